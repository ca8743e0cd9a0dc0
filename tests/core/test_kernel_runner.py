"""Which code computes: kernels where they can be used, and nothing breaks where they cannot."""

import os

import pytest
import torch

from probmask.core import kernel_runner


def test_a_numba_that_cannot_be_imported_is_told_and_done_without(monkeypatch):
    def refuse(name):
        raise ImportError("Numba needs another NumPy")

    monkeypatch.setattr(kernel_runner, "import_module", refuse)
    kernel_runner._kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="Numba needs another NumPy"):
            assert kernel_runner.kernels_for("relaxation_kernels", torch.zeros(3)) is None
        assert kernel_runner.kernels_for("relaxation_kernels", torch.zeros(3)) is None  # told once
    finally:
        kernel_runner._kernels.cache_clear()


def test_parts_of_all_sizes_share_one_pool(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    pool = kernel_runner._pool(os.getpid(), 3)
    for count in (70_000, 100_000, 140_000):
        parts = kernel_runner.in_parts(count, lambda begin, end: (begin, end))
        ends = [0, *(end for _, end in parts)]
        assert [begin for begin, _ in parts] == ends[:-1]
        assert ends[-1] == count
        assert kernel_runner._pool(os.getpid(), 3) is pool


def test_parts_of_many_tensors_are_all_of_each_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = [0, 50_000, 7, 0, 100_000, 1]
    parts = kernel_runner.in_parts_of(sizes, lambda spans: spans)
    assert len(parts) == 3
    ends = [0] * len(sizes)
    for k, begin, end in (span for spans in parts for span in spans):
        assert ends[k] == begin < end
        ends[k] = end
    assert ends == sizes
    assert kernel_runner.in_parts_of([], lambda spans: spans) == [[]]
