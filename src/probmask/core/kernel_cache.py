"""Compile functions with Numba and cache them on disk, whatever happens to the cache.

With ``njit(cache=True)``, a damaged file in Numba's cache, an unwritable directory or a full disk
raises from the first call of a function, in every process, until somebody deletes the cache.
`cached_njit` gives each function a cache that treats all of this as a missing entry: Numba compiles
the function again, and one warning names the directory.

It uses what Numba provides for further kinds of caches: `FunctionCache` decides what is stored and
where (``NUMBA_CACHE_DIR`` works as usual), and a dispatcher asks the object in its ``_cache`` for
compiled code. Only our own dispatchers get another cache; nothing in Numba is replaced.
"""

import hashlib
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

from probmask.errors import KernelCacheWarning

_warned = threading.Event()  # there is one warning per process


def cached_njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator like ``numba.njit(cache=True, **options)`` that survives a bad cache."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = njit(**options)(function)
        try:
            dispatcher._cache = _SafeCache(function)
        except RuntimeError:  # Numba finds no directory that it can write to
            default = Path(function.__code__.co_filename).parent / "__pycache__"
            _warn_of(_chosen_directory() or default, "it cannot be written")
        else:
            _check_chosen_directory(dispatcher._cache.cache_path)
        return dispatcher

    return decorate


class _SafeCache(FunctionCache):
    """Numba's cache of one function. Errors while reading or writing do not reach the caller."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFiles(
            self._cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code, or None if it has to be compiled."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # damaged files can raise anything
            _warn_of(self.cache_path, repr(error))
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write compiled code, replacing damaged files."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_of(self.cache_path, repr(error))


class _CheckedFiles(IndexDataCacheFile):
    """The files of one function, each entry with a digest that is checked before it is used.

    Without it, damaged machine code could crash the process. Each entry also names its key: when
    two processes write at the same time, or one is killed between writing the index and the code,
    the index can refer to the code of another signature or of an earlier source.
    """

    def save(self, key: Any, data: Any) -> None:
        """Write an entry."""
        code = self._dump(data)
        super().save(key, (self._owner(key), _digest(code), code))

    def load(self, key: Any) -> Any:
        """Return an entry, or None if there is none."""
        entry = super().load(key)
        if entry is None:
            return None
        owner, digest, code = entry
        if owner != self._owner(key):
            return None
        if digest != _digest(code):
            raise ValueError("wrong digest")
        # Numba's own cache is pickled too, so anyone who can write to its directory can run code.
        return pickle.loads(code)  # noqa: S301

    def _load_index(self) -> Any:
        """Return the names of the entries, none if the index is damaged."""
        try:
            names = super()._load_index()
            if not all(isinstance(name, str) for name in names.values()):
                raise TypeError("a name is not text")
        except Exception as error:  # damaged files can raise anything
            _warn_of(self._cache_path, repr(error))
            return {}
        return names

    def _owner(self, key: Any) -> bytes:
        return _digest(repr((self._source_stamp, key)).encode())


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _check_chosen_directory(used: str) -> None:
    """Warn if Numba uses another directory than the one that the user chose."""
    chosen = _chosen_directory()
    if chosen and not Path(used).is_relative_to(chosen):
        _warn_once(f"NUMBA_CACHE_DIR={chosen}: cannot be written. Kernels are cached in {used}.")


def _chosen_directory() -> str:
    """Return NUMBA_CACHE_DIR, empty if it is not set."""
    return str(config.CACHE_DIR)  # type: ignore[attr-defined]


def _warn_of(directory: Any, reason: object) -> None:
    _warn_once(
        f"The kernel cache in {directory} cannot be used ({reason}). The kernels are compiled "
        "again, and bad files are replaced if possible. If this warning comes back, free some "
        "space, delete the directory, or set NUMBA_CACHE_DIR to a writable directory."
    )


def _warn_once(message: str) -> None:
    if not _warned.is_set():
        _warned.set()
        warnings.warn(message, KernelCacheWarning, stacklevel=3)
