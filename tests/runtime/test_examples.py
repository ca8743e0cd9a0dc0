"""The examples in the docstrings of `probmask.runtime` run and print what they state."""

import doctest
import importlib

import pytest

from probmask import runtime


@pytest.mark.parametrize(
    "name",
    [
        "backend",
        "compilation",
        "plan.partition",
        "portable.loading",
        "portable.numpy_engine",
        "run.engine",
    ],
)
def test_examples_print_what_they_state(name):
    result = doctest.testmod(importlib.import_module(f"probmask.runtime.{name}"))
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("name", runtime.__all__)
def test_every_public_name_has_an_example(name):
    assert "Example:\n" in getattr(runtime, name).__doc__
