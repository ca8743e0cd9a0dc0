"""One thread per test process: tests run side by side, and small problems need no more."""

import os

import pytest

# Before PyTorch is imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(params=["tied", "learned"])
def recipe(request):
    """ProbMask's ways to its probabilities: what its user is promised holds for both."""
    return request.param
