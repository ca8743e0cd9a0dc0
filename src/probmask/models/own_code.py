"""Import of the user's own code: a network or an optimizer, ``package.module:name``.

The module may be in the working directory. That directory is never added to `sys.path`: PyTorch and
other packages try to import optional packages such as dill or pandas, and would execute a file of
that name that came with a downloaded network.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from probmask.errors import InputError

# Top-level modules of Python's own import machinery.
_IMPORT_MACHINERY = ("importlib", "_frozen_importlib", "_frozen_importlib_external")


def import_own(name: str, *, label: str) -> Any:
    """Import ``package.module:name``.

    The module is searched for on Python's path, then in the working directory. Modules found in
    the working directory may import others from there, at any time.

    Args:
        name: The module and the name of a function or class in it.
        label: What precedes the name in error messages, such as ``--model``.

    Raises:
        InputError: If the module or the name does not exist.
    """
    module, _, attribute = name.partition(":")
    allow_imports(name, Path.cwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{label} {name}: cannot be imported: {error}.") from error


def allow_imports(name: str, directory: Path) -> None:
    """Let the module of ``package.module:name`` be imported from the directory.

    Modules on Python's path and in directories that were allowed before take precedence.
    """
    finders = [finder for finder in sys.meta_path if isinstance(finder, _OwnModules)]
    for finder in finders:
        if finder.directory == directory:
            break
    else:
        finder = _OwnModules(directory)
        sys.meta_path.append(finder)
    finder.requested.add(_top_level(name))


def module_location(name: str) -> Path | None:
    """Return the file or package from which ``package.module:name`` would be imported.

    Nothing is imported. The result is the location of the top-level package or module, or None if
    it does not exist or is built into Python.
    """
    top = _top_level(name)
    spec = _find(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.has_location and spec.origin else None


def untrusted(
    source: object,
    name: str,
    *,
    kind: str = "model",
    flag: str = "--model",
    in_python: str | None = None,
) -> str:
    """Return the error for a file that names code which the user did not ask for.

    Args:
        source: The file or directory that names the code.
        name: The code, ``package.module:name``.
        kind: What the code is, "model" or "optimizer".
        flag: The flag that names such code in this command.
        in_python: What to pass in Python to import it, if there is a function for that.
    """
    location = module_location(name)
    where = "" if location is None else f" from {location}"
    hint = "" if in_python is None else f" (in Python: {in_python})"
    return (
        f"{source}: names the {kind} {name!r:.200}, which would be imported{where}. Importing it "
        f"executes its code; if you trust it, pass --trust or {flag}{hint}."
    )


class _OwnModules(MetaPathFinder):
    """Finds modules in a directory for the user's own modules only.

    Args:
        directory: Directory with the user's modules.

    Attributes:
        requested: Top-level names of the modules that the user asked for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requested: set[str] = set()
        self._found: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that the user asked for, or that one of the user's modules imports."""
        if path is not None:  # part of a package, which knows its own directory
            return None
        if fullname not in self.requested and _importing_module() not in self._found:
            return None
        spec = PathFinder.find_spec(fullname, [str(self.directory)], target)
        if spec is not None:
            self._found.add(fullname)
        return spec


def _importing_module() -> str:
    """Return the top-level name of the module that contains the import statement."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = _top_level(str(frame.f_globals.get("__name__", "")))
        if name not in _IMPORT_MACHINERY:
            return name
        frame = frame.f_back
    return ""


def _find(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top) if top else None
    except ValueError:  # a module without a specification, such as __main__
        return None


def _top_level(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]
