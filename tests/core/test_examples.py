"""The examples in the docstrings of `probmask.core` run and print what they state."""

import doctest
import importlib
import pkgutil

import pytest

from probmask import core

MODULES = [
    info.name
    for info in pkgutil.walk_packages(core.__path__, "probmask.core.")
    if not info.name.endswith(("_kernels", "vector_math"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_state(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("name", core.__all__)
def test_every_public_name_has_an_example(name):
    assert "Example:\n" in getattr(core, name).__doc__
