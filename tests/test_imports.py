"""What `import probmask` pulls in, and which part of the source imports which."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import probmask
from analysis.made_up import held_out
from analysis.made_up import record as made_up_record

SOURCE = Path(probmask.__file__).parent

# Data flows one way: a module imports from its own part or from parts before it.
PARTS = [
    {"errors", "version", "launch", "checks", "messages", "parsing", "files"},
    {"core"},
    {"masking"},
    {"methods"},
    {"models"},
    {"data"},
    {"artifact"},
    {"runtime"},
    {"training"},
    {"analysis"},
    {"sweeps"},
    {"report"},
    {"cli"},
]

HEAVY = {
    "llvmlite",
    "numba",
    "lightning",
    "lightning_fabric",
    "lightning_utilities",
    "pytorch_lightning",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "PIL",
    "pooch",
    "requests",
    "rich",
    "sklearn",
    "tensorboard",
    "tomli_w",
    "torch",
    "numpy",
}


def modules_after(code, where=None):
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=where)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    "code",
    [
        "import probmask; dir(probmask); probmask.__version__; probmask.InputError",
        "import probmask.cli",
        "import probmask.cli\ntry: probmask.cli.main(['train', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code):
    assert modules_after(code) & HEAVY == set()


@pytest.mark.parametrize(
    "arguments", [["compare"], ["compare", "--on", "val"], ["report", "--out", "page.html"]]
)
def test_reading_records_needs_no_pytorch(arguments, tmp_path):
    record = tmp_path / "made-up.json"
    record.write_text(json.dumps(made_up_record("probmask", 0.9, selection=held_out(60.0))))
    code = f"from probmask.cli import main\nassert main({[*arguments, str(record)]!r}) == 0"
    assert modules_after(code, where=tmp_path) & (HEAVY - {"rich"}) == set()


def test_the_own_loop_api_needs_no_trainer_and_no_plotting():
    code = "import probmask\nfor name in probmask.__all__: getattr(probmask, name)"
    own_loop = modules_after(code)
    assert "torch" in own_loop
    # Names of the trainer may need Lightning; those of the own-loop API may not.
    if "train" not in probmask.__all__:
        assert own_loop & (HEAVY - {"torch", "numpy"}) == set()


@pytest.mark.parametrize("name", probmask.__all__)
def test_every_public_name_resolves(name):
    assert getattr(probmask, name) is not None


def test_the_list_of_public_names_is_complete_and_sorted():
    assert list(probmask.__all__) == sorted(probmask.__all__)
    assert set(probmask.__all__) == {*probmask._HOMES, *probmask._PACKAGES, "__version__"}
    assert dir(probmask) == sorted(probmask.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = probmask.nothing


def test_the_names_of_the_design_are_there():
    """The three ways in begin with these."""
    for name in ("attach", "ProbMask", "save", "load", "train"):
        assert name in probmask.__all__, name


def source_modules():
    return {
        ".".join(("probmask", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imported(module, path):
    """Every module of the package that the file names in an import, wherever it stands."""
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            if base == "probmask":
                yield from ((f"probmask.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno


def height(module):
    part = module.split(".")[1]
    return next((index for index, parts in enumerate(PARTS) if part in parts), None)


def test_every_part_of_the_source_has_its_place():
    parts = {module.split(".")[1] for module in source_modules()} - {"__init__"}
    assert parts == set().union(*PARTS)


def test_nothing_imports_upwards():
    upwards = []
    for module, path in source_modules().items():
        if module == "probmask.__init__":  # hands out names from everywhere, lazily
            continue
        for target, line in imported(module, path):
            if target.partition(".")[0] != "probmask":
                continue
            there = height(target) if "." in target else None
            if there is None or there > height(module):
                upwards.append(f"{path.relative_to(SOURCE)}:{line} imports {target}")
    assert upwards == []


def test_the_package_itself_imports_nothing_but_its_version():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    eager = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("probmask")
    ]
    assert eager == ["probmask.version"]
