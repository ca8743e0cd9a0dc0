"""Floats as integers of the same order, for searches that read one digit after another."""

import torch
from torch import Tensor


def ordered_bits(x: Tensor) -> Tensor:
    """Return integers in the order of the floats: the bits, reversed for negative numbers.

    In this order -0.0 comes just below 0.0.
    """
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    return bits ^ ((bits >> (torch.iinfo(bits.dtype).bits - 1)) & torch.iinfo(bits.dtype).max)


def float_from(ordered: int, dtype: torch.dtype) -> float:
    """Return the float with these `ordered_bits`."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    bits = ordered ^ torch.iinfo(integer).max if ordered < 0 else ordered
    return float(torch.tensor(bits, dtype=integer).view(dtype))
