"""What tests of compiled code share."""

import pytest

from probmask.core import compiled


@pytest.fixture(params=["compiled", "plain"])
def way(request, monkeypatch):
    """With Numba, and as if it were not installed."""
    if request.param == "plain":
        monkeypatch.setattr(compiled, "find_spec", lambda name: None)
    compiled._kernels.cache_clear()
    yield request.param
    compiled._kernels.cache_clear()
