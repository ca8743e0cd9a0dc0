"""Docstrings of the public API: complete, and their examples run."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import probmask

SOURCE = Path(probmask.__file__).parent
PACKAGES = ("", ".artifact", ".core", ".data", ".methods", ".models", ".report", ".runtime")


def modules_with_examples():
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>>" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__")


def public_functions():
    for suffix in PACKAGES:
        package = importlib.import_module(f"probmask{suffix}")
        for name in package.__all__:
            if inspect.isfunction(function := getattr(package, name)):
                yield pytest.param(function, id=f"{package.__name__}.{name}")


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_examples_print_what_they_state(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples write their files here
    found = doctest.testmod(importlib.import_module(name), extraglobs={"probmask": probmask})
    assert found.attempted > 0
    assert found.failed == 0


@pytest.mark.parametrize("function", list(public_functions()))
def test_public_functions_are_documented_completely(function):
    signature = inspect.signature(function)
    sections = ["Example:"]
    sections += ["Args:"] if signature.parameters else []
    sections += ["Returns:"] if signature.return_annotation is not None else []
    assert [section for section in sections if section not in function.__doc__] == []
