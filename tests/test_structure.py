"""The source has no import cycle, no ambiguous file names and only flat class hierarchies."""

import ast
import functools
import graphlib
from collections import defaultdict
from pathlib import Path

import probmask

SOURCE = Path(probmask.__file__).parent

# Base names that two files may share, with the reason.
SHARED_NAMES = {
    "export": "cli/export.py is the command for artifact/export.py",
}
# Classes that are both instantiated and subclassed, with the reason.
INSTANTIATED_BASES = {
    "probmask.errors.InputError": "exceptions form a hierarchy so that callers can catch a family",
}


@functools.cache
def modules():
    """Every module by its dotted name; a package goes by the name of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("probmask", *path.relative_to(SOURCE).with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def import_targets(module):
    """Yield (local name, dotted name) of every import, also in functions and TYPE_CHECKING."""
    path, tree = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def imported_modules(module):
    """Yield the modules of the package that a module imports."""
    for _, target in import_targets(module):
        owner = target if target in modules() else target.rpartition(".")[0]
        if owner in modules() and owner not in ("probmask", module):
            yield owner


def test_no_import_cycle():
    """Imports in functions and under TYPE_CHECKING count. `probmask` itself imports lazily."""
    graph = {module: set(imported_modules(module)) for module in modules() if module != "probmask"}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise AssertionError(f"import cycle: {cycle}") from None


def test_file_names_are_unique():
    paths = defaultdict(list)
    for path, _ in modules().values():
        if path.stem not in ("__init__", "__main__"):
            paths[path.stem].append(str(path.relative_to(SOURCE)))
    shared = {stem: found for stem, found in paths.items() if len(found) > 1}
    assert {stem: shared[stem] for stem in shared if stem not in SHARED_NAMES} == {}
    assert [stem for stem in SHARED_NAMES if stem not in shared] == []


@functools.cache
def resolved_names(module):
    """The dotted name of every class and import that a module can name."""
    own = {
        node.name: f"{module}.{node.name}"
        for node in modules()[module][1].body
        if isinstance(node, ast.ClassDef)
    }
    return {**dict(import_targets(module)), **own}


def dotted(module, node):
    """Resolve `Name`, `package.Name` or `Name[T]` to a dotted name."""
    if isinstance(node, ast.Subscript):
        return dotted(module, node.value)
    if isinstance(node, ast.Attribute):
        owner = dotted(module, node.value)
        return owner and f"{owner}.{node.attr}"
    return resolved_names(module).get(node.id) if isinstance(node, ast.Name) else None


def definition(name):
    """Follow re-exports to the module that defines a class."""
    module, _, attribute = name.rpartition(".")
    target = resolved_names(module).get(attribute) if module in modules() else None
    return name if target in (None, name) else definition(target)


@functools.cache
def bases():
    """The bases in the package of every class in the package."""
    found = {}
    for module, (_, tree) in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                names = [dotted(module, base) for base in node.bases]
                ours = [definition(n) for n in names if n and n.startswith("probmask.")]
                found[f"{module}.{node.name}"] = ours
    return found


def depth(name):
    return 1 + max((depth(base) for base in bases().get(name, ())), default=0)


def test_class_hierarchies_have_at_most_two_levels():
    assert {name: bases()[name] for name in bases() if depth(name) > 2} == {}


def test_no_class_is_both_instantiated_and_subclassed():
    subclassed = {base for found in bases().values() for base in found}
    instantiated = defaultdict(list)
    for module, (path, tree) in modules().items():
        for node in ast.walk(tree):
            name = dotted(module, node.func) if isinstance(node, ast.Call) else None
            if name and name.startswith("probmask.") and definition(name) in subclassed:
                instantiated[definition(name)].append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {k: v for k, v in instantiated.items() if k not in INSTANTIATED_BASES} == {}
