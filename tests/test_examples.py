"""Every script in examples/ runs at a tiny size.

The convention for an example: ``python examples/NAME.py`` needs no other argument and no network.
``--quick`` shortens it to a few seconds. It prints what it shows, and writes files only into the
working directory. A new file in examples/ is found and run here without an entry in this file.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import probmask

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
SOURCE = Path(probmask.__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs_at_a_tiny_size(example, tmp_path):
    files = set(example.parent.rglob("*"))
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    trains = "probmask.train(" in example.read_text(encoding="utf-8")
    for _ in range(2 if trains else 1):  # a second run finds the directories of the first
        done = subprocess.run(
            [sys.executable, "-B", str(example), "--quick"],
            cwd=tmp_path,
            env={**os.environ, **offline, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        assert [line for line in done.stderr.splitlines() if "probmask" in line.lower()] == []
    assert set(example.parent.rglob("*")) == files


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_says_what_it_shows_and_how_to_run_it(example):
    text = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))
    assert text
    assert f"python examples/{example.name}" in text
