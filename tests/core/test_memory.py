"""Allocation in large pages."""

import copy

import pytest
import torch

from probmask.core.memory import empty_in_large_pages


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7, 11), (1500, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_an_ordinary_tensor(shape, dtype):
    result = empty_in_large_pages(torch.Size(shape), dtype)
    assert (result.shape, result.dtype, result.device.type) == (shape, dtype, "cpu")
    assert result.is_contiguous()
    assert torch.equal(copy.deepcopy(result.fill_(2.0)), torch.full(shape, 2.0, dtype=dtype))
