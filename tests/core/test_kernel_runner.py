"""Loading of kernels, the threads that run them, and the memory of their results."""

import copy
import os
import subprocess
import sys

import pytest
import torch

from probmask.core import kernel_runner


def test_a_failing_import_of_numba_warns_once(monkeypatch):
    def fail(name):
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr(kernel_runner, "import_module", fail)
    kernel_runner._kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Numba needs another NumPy"):
            assert kernel_runner.kernels_for("relaxation_kernels", torch.zeros(3)) is None
        # The second call does not warn.
        assert kernel_runner.kernels_for("relaxation_kernels", torch.zeros(3)) is None
    finally:
        kernel_runner._kernels.cache_clear()


def test_all_sizes_use_one_thread_pool(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    pool = kernel_runner._pool(os.getpid(), 3)
    for count in (70_000, 100_000, 140_000):
        parts = kernel_runner.map_parts(count, lambda begin, end: (begin, end))
        ends = [0, *(end for _, end in parts)]
        assert [begin for begin, _ in parts] == ends[:-1]
        assert ends[-1] == count
        assert kernel_runner._pool(os.getpid(), 3) is pool


def test_spans_cover_every_entry_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = [0, 50_000, 7, 0, 100_000, 1]
    parts = kernel_runner.map_spans(sizes, lambda spans: spans)
    assert len(parts) == 3
    ends = [0] * len(sizes)
    for k, begin, end in (span for spans in parts for span in spans):
        assert ends[k] == begin < end
        ends[k] = end
    assert ends == sizes
    assert kernel_runner.map_spans([], lambda spans: spans) == [[]]


def test_a_forked_process_has_its_own_threads():
    """An inherited pool would wait for threads that do not exist."""
    code = """
import os, torch
from probmask.core.kernel_runner import map_parts
torch.set_num_threads(2)
assert len(map_parts(100_000, lambda begin, end: end - begin)) == 2
child = os.fork()
if child == 0:
    os._exit(0 if sum(map_parts(100_000, lambda begin, end: end - begin)) == 100_000 else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7, 11), (1500, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_result_in_large_pages_is_an_ordinary_tensor(shape, dtype):
    result = kernel_runner.empty_in_large_pages(torch.Size(shape), dtype)
    assert (result.shape, result.dtype, result.device.type) == (shape, dtype, "cpu")
    assert result.is_contiguous()
    assert torch.equal(copy.deepcopy(result.fill_(2.0)), torch.full(shape, 2.0, dtype=dtype))
