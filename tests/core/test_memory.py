"""Room for results: of any shape, and a tensor like any other."""

import copy

import pytest
import torch

from probmask.core.memory import room_for


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7, 11), (1500, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_a_tensor_like_any_other(shape, dtype):
    room = room_for(torch.Size(shape), dtype)
    assert (room.shape, room.dtype, room.device.type) == (shape, dtype, "cpu")
    assert room.is_contiguous()
    assert torch.equal(copy.deepcopy(room.fill_(2.0)), torch.full(shape, 2.0, dtype=dtype))
