"""Tensors of PyTorch around the kernels."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from probmask.runtime.run.kernel_step import Tensors


@final
class PyTorchTensors(Tensors):
    """Tensors of PyTorch."""

    def contiguous(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy of it, with its elements in order in memory."""
        # The memory of a negative view, such as the imaginary part of a conjugate, has other signs.
        plain = tensor.is_contiguous() and not tensor.is_neg()
        return tensor if plain else tensor.resolve_neg().contiguous()

    def address(self, tensor: Tensor) -> int:
        """Return where the first element is in memory."""
        return tensor.data_ptr()

    def empty(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of unspecified content."""
        return torch.empty(*shape, dtype=torch.float32, device="cpu")
