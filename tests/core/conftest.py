"""What tests of compiled code share."""

import pytest

from probmask.core import kernel_runner


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    """With Numba, and as if it were not installed."""
    if request.param == "plain":
        monkeypatch.setattr(kernel_runner, "find_spec", lambda name: None)
    kernel_runner._kernels.cache_clear()
    yield request.param
    kernel_runner._kernels.cache_clear()
