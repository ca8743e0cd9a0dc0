"""Integer grids: each channel's weights as integers times one scale.

A scale is (4 + c mod 4) · 2^⌊c/4⌋ for an integer code c: four scales per octave, each of which has
three significant bits. The product of an integer of up to 8 bits and a scale is therefore exact in
fp32, and the grid of a channel can be found again from its values alone (`grid_of`).

A channel is one index of the first dimension: an output of a linear or convolutional layer.
`quantized` takes whole tensors. The functions after it take the kept weights of all channels in one
vector, channel after channel, and `counts`, the number of kept weights of each channel, at least 1.
"""

import math
from typing import Any

import torch
from torch import Tensor

# Candidates below the smallest scale that represents the largest weight: two octaves. A smaller
# scale clips the largest weights and represents the others more precisely.
_CANDIDATES = 9
_SUBNORMAL = {torch.float32: -149, torch.float64: -1074}  # exponent of the smallest number
_HIDDEN_BITS = 53  # of a float64
# Scales 7 · 2^e, 5 · 2^e, 3 · 2^e and 1 · 2^e, the largest first: the factor, and c - 4 e.
_FACTORS = ((7, 3), (5, 1), (3, -2), (1, -8))


def quantized(tensor: Tensor, bits: int) -> Tensor:
    """Return the tensor with each nonzero entry rounded to the grid of its channel.

    A channel that lies on a grid of these bits is not changed; the others get the scale with the
    least squared error. A tensor of another dtype than fp32 and fp64 is returned as it is, and so
    is one that contains NaN or infinity, or would.
    """
    if tensor.dtype not in _SUBNORMAL:
        return tensor
    places, counts = kept_places(tensor)
    weights = tensor.flatten()[places]
    if not weights.numel() or not bool(weights.isfinite().all()):
        return tensor
    codes, exact = grid_of(weights, counts, bits)
    if not bool(exact.all()):
        codes = torch.where(exact, codes, calibrate(weights, counts, bits))
    rounded = from_grid(round_to_grid(weights, codes, counts, bits), codes, counts, tensor.dtype)
    if not bool(rounded.isfinite().all()):
        return tensor
    dense = tensor.new_zeros(tensor.numel())
    dense[places] = rounded
    return torch.empty_like(tensor).copy_(dense.reshape(tensor.shape))


def fake_quantized(tensor: Tensor, bits: int) -> Tensor:
    """Return `quantized` with straight-through gradients: those of the identity."""
    rounded: Tensor = _StraightThrough.apply(tensor, bits)  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, bits: int) -> Tensor:
        rounded = quantized(tensor, bits)
        return tensor.clone() if rounded is tensor else rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def kept_places(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the nonzero entries, and their number in each channel with any."""
    places = tensor.flatten().nonzero().flatten()
    channel = places.div(max(1, math.prod(tensor.shape[1:])), rounding_mode="floor")
    _, counts = torch.unique_consecutive(channel, return_counts=True)
    return places, counts


def largest_integer(bits: int) -> int:
    """2^(bits - 1) - 1: the largest magnitude of a quantized weight. The grid is symmetric."""
    return (1 << (bits - 1)) - 1


def scale_of(codes: Tensor) -> Tensor:
    """(4 + c mod 4) · 2^⌊c/4⌋, in fp64."""
    exponents = codes.div(4, rounding_mode="floor")
    normal = exponents.clamp(-1022, 1023)
    return (4 + codes % 4).double() * _power_of_two(normal) * _power_of_two(exponents - normal)


def calibrate(weights: Tensor, counts: Tensor, bits: int) -> Tensor:
    """Return the code of each channel that minimizes Σ (w - q scale)², q as in `round_to_grid`.

    The candidates are the smallest scale that represents the largest weight of the channel, and the
    eight below it.
    """
    sizes = weights.abs().double()
    peak = torch.segment_reduce(sizes, "max", lengths=counts)
    fraction, exponent = torch.frexp(peak / largest_integer(bits))
    # The scale is at least the quotient, whose first three bits are 8 · fraction, in [4, 8).
    first = 4 * (exponent.long() - 3) + (8 * fraction).ceil().long() - 4
    least = 4 * _SUBNORMAL[weights.dtype]
    best, best_error = first, torch.full_like(peak, torch.inf)
    for candidate in range(_CANDIDATES):
        codes = (first - candidate).clamp_min(least)
        scales = scale_of(codes).repeat_interleave(counts)
        error = (sizes - _magnitudes(sizes, scales, bits) * scales).square_()
        total = torch.segment_reduce(error, "sum", lengths=counts)
        better = total < best_error
        best, best_error = torch.where(better, codes, best), torch.where(better, total, best_error)
    return best


def round_to_grid(weights: Tensor, codes: Tensor, counts: Tensor, bits: int) -> Tensor:
    """q = ±min(max(round(|w| / scale), 1), 2^(bits - 1) - 1), with the sign of w.

    A weight other than 0 never becomes 0, so the number of kept weights stays the same.
    """
    scales = scale_of(codes).repeat_interleave(counts)
    return (_magnitudes(weights.abs().double(), scales, bits) * weights.sign()).long()


def from_grid(integers: Tensor, codes: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return q · scale."""
    return (integers.double() * scale_of(codes).repeat_interleave(counts)).to(dtype)


def grid_of(weights: Tensor, counts: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of the coarsest grid that contains the weights exactly, and where it exists.

    Codes of channels without such a grid have no meaning. No weight may be 0, NaN or infinite.
    """
    odd, exponents = _odd_parts(weights.abs().double())
    shared = -torch.segment_reduce(-exponents.double(), "max", lengths=counts).long()
    shift = exponents - shared.repeat_interleave(counts)
    limit = 7 * largest_integer(bits)
    small = (odd <= limit) & (shift <= limit.bit_length())
    multiples = torch.where(small, odd << shift.clamp_max(limit.bit_length()), limit + 1)
    codes, found = torch.zeros_like(shared), torch.zeros_like(shared, dtype=torch.bool)
    for factor, offset in _FACTORS:
        fits = (multiples % factor == 0) & (multiples <= factor * largest_integer(bits))
        all_fit = torch.segment_reduce(fits.double(), "min", lengths=counts) == 1
        codes = torch.where(all_fit & ~found, 4 * shared + offset, codes)
        found |= all_fit
    return codes, found


def narrow(tensor: Tensor) -> Tensor:
    """Return an fp32 or fp64 tensor in fp16 if it stays precise, and any other tensor as it is.

    It stays precise if each number changes by at most 2^-11 of itself, or 2^-20 of the largest one.
    fp16 numbers stay exact.
    """
    if tensor.dtype not in _SUBNORMAL or not tensor.numel():
        return tensor
    half = tensor.to(torch.float16)
    sizes = tensor.abs()
    tolerance = torch.maximum(sizes * 2**-11, sizes.max() * 2**-20)
    return half if bool(((half.to(tensor.dtype) - tensor).abs() <= tolerance).all()) else tensor


def _magnitudes(sizes: Tensor, scales: Tensor, bits: int) -> Tensor:
    return (sizes / scales).round_().clamp_(1, largest_integer(bits))


def _odd_parts(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive numbers as odd integers times powers of two: the integers, the exponents."""
    fraction, exponent = torch.frexp(sizes)
    whole = (fraction * 2.0**_HIDDEN_BITS).long()
    lowest = whole & -whole  # its lowest set bit, a power of two
    zeros = torch.frexp(lowest.double())[1] - 1
    return whole >> zeros, exponent.long() - _HIDDEN_BITS + zeros


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^e in fp64, built from its bits: the results of `exp2` and `pow` may be rounded."""
    normal = exponents.clamp(-1022, 1023)
    return ((normal + 1023) << 52).view(torch.float64)
