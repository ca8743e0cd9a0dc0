"""Fixtures of the tests of compiled code."""

import pytest

from probmask.core import kernel_runner


@pytest.fixture(params=["compiled", "plain"])
def backend(request, monkeypatch):
    """Run a test with Numba, and once more as if it were not installed."""
    if request.param == "plain":
        monkeypatch.setattr(kernel_runner, "find_spec", lambda name: None)
    kernel_runner._kernels.cache_clear()
    yield request.param
    kernel_runner._kernels.cache_clear()
