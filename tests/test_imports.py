"""`import probmask` is light, and the packages import each other in one direction only."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import probmask
from analysis.synthetic_records import held_out
from analysis.synthetic_records import record as synthetic_record

SOURCE = Path(probmask.__file__).parent

# In this order: a module imports only from its own part or from parts before it.
PARTS = [
    {"errors", "version", "launch", "checks", "messages", "parsing", "schema", "files"},
    {"storage"},
    {"core"},
    {"optim"},
    {"masking"},
    {"methods"},
    {"models"},
    {"data"},
    {"artifact", "runtime"},  # an artifact may carry a graph, and the engine compiles artifacts
    {"integrations"},
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
    "accelerate",
    "peft",
    "transformers",
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
def test_light_imports(code):
    assert modules_after(code) & HEAVY == set()


@pytest.mark.parametrize(
    "arguments", [["compare"], ["compare", "--on", "val"], ["report", "--out", "page.html"]]
)
def test_reading_records_does_not_import_pytorch(arguments, tmp_path):
    record = tmp_path / "made-up.json"
    record.write_text(json.dumps(synthetic_record("probmask", 0.9, selection=held_out(60.0))))
    code = f"from probmask.cli import main\nassert main({[*arguments, str(record)]!r}) == 0"
    assert modules_after(code, where=tmp_path) & (HEAVY - {"rich"}) == set()


def test_only_the_trainer_imports_more_than_pytorch_and_numpy():
    names = [name for name in probmask.__all__ if name != "train"]
    found = modules_after(
        f"import probmask, torch\nfor name in {names}: getattr(probmask, name)\n"
        "probmask.find_sites(torch.nn.Linear(2, 2))"  # knows layers of transformers
    )
    assert "torch" in found
    assert found & (HEAVY - {"torch", "numpy"}) == set()
    assert "lightning_fabric" in modules_after("import probmask\nprobmask.train")


@pytest.mark.parametrize("name", probmask.__all__)
def test_every_public_name_resolves(name):
    assert getattr(probmask, name) is not None


def test_public_names_are_complete_and_sorted():
    assert list(probmask.__all__) == sorted(probmask.__all__)
    assert set(probmask.__all__) == {*probmask._HOMES, *probmask._PACKAGES, "__version__"}
    assert dir(probmask) == sorted(probmask.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = probmask.nothing


def source_modules():
    return {
        ".".join(("probmask", *path.relative_to(SOURCE).with_suffix("").parts)): path
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imported(module, path):
    """Yield the modules that a file imports, also in functions and under TYPE_CHECKING."""
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


def position(module):
    part = module.split(".")[1]
    return next((index for index, parts in enumerate(PARTS) if part in parts), None)


def test_every_package_is_in_the_order():
    parts = {module.split(".")[1] for module in source_modules()} - {"__init__"}
    assert parts == set().union(*PARTS)


def test_nothing_imports_upwards():
    upwards = []
    for module, path in source_modules().items():
        if module == "probmask.__init__":  # imports names from all packages, lazily
            continue
        for target, line in imported(module, path):
            if target.partition(".")[0] != "probmask":
                continue
            there = position(target) if "." in target else None
            if there is None or there > position(module):
                upwards.append(f"{path.relative_to(SOURCE)}:{line} imports {target}")
    assert upwards == []


def test_the_package_imports_only_its_version():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    eager = [
        node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("probmask")
    ]
    assert eager == ["probmask.version"]
