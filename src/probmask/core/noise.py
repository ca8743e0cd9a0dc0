"""Random numbers as a pure function of a seed and counters.

No generator state needs to be saved or restored: a resumed run, another rank or a recomputed
forward pass that uses the same seed and counters gets the same numbers.

There are two kinds. `uniform_`, `normal_` and `logistic_` fill a tensor by a PyTorch generator,
whose numbers depend on the device. `uniforms` and `logistic` hash the position of each entry: they
give the same bits on every device and in compiled code, and a backward pass recomputes the noise
of its forward pass instead of storing it.
"""

from enum import IntEnum, unique

import torch
from torch import Tensor

_BITS_64 = (1 << 64) - 1
_BITS_32 = 0xFFFFFFFF
# PyTorch's fp32 uniforms are multiples of 2^-24, so this is their smallest distance to 0 and 1.
_EDGE = 2.0**-24

# The hash: rounds of x ^= x >> shift, x *= multiplier on 32 bits. This is lowbias32 (C. Wellons)
# with one more round. The multipliers are below 2^31, so that their product with a 32-bit number
# does not overflow a signed 64-bit number.
SHIFTS = (16, 15, 15, 14)
MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)


@unique
class Stream(IntEnum):
    """Counters of the random streams that do not belong to an update.

    Pass a stream to `fold`, `uniform_`, `logistic_` or `normal_` in place of the number of an
    update. Update numbers are 0 or more; streams are negative and unique, so two streams of one
    seed never share random numbers. Do not change or reuse a value, because runs would no longer
    reproduce. Give a new stream the next free number.

    Example:
        >>> _ = uniform_(torch.empty(3), 0, Stream.SPARSE_START)
    """

    SPARSE_START = -1  # random masks of methods that start sparse
    REINITIALIZATION = -2  # new initial weights of all layers
    PROBE_BATCHES = -3  # batches on which a method measures gradients
    EDGE_POPUP_SCORES = -4  # initial scores of EdgePopup
    GRASP_XAVIER = -5  # Xavier weights on which GraSP scores linear layers
    L0_GATES = -6  # initial gates of L0
    MLPRUNE_BATCHES = -7  # batches on which MLPrune measures curvature
    FINAL_SAMPLE = -8  # final mask of ProbMask(select="sample")


class RunStream(IntEnum):
    """First counters of the random streams derived from the seed of a whole run.

    The streams of `Stream` are derived from the seed of the masks, ``fold(seed, RunStream.MASKS)``.
    Two streams here may share a value if they are followed by different numbers of counters, which
    `fold` distinguishes.
    """

    INITIAL_WEIGHTS = 0  # followed by nothing
    BATCH_ORDER = 0  # followed by the epoch
    AUGMENTATION = 1  # followed by epoch, or by epoch and position
    MASKS = 2  # followed by nothing
    UPDATE = 3  # followed by rank and step: dropout and other random layers


def fold(seed: int, *counters: int) -> int:
    """Mix a seed with counters into 63 bits by SplitMix64's finalizer, once per counter.

    Changing the seed or any counter changes each bit with probability 1/2 (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", 2014).

    Args:
        seed: any integer; only its low 64 bits count.
        counters: for example rank, step, draw and layer; their number and order count too.

    Returns:
        An integer in [0, 2^63), a valid seed for PyTorch's generators.

    Example:
        >>> fold(0, 1, 2) == fold(0, 1, 2)
        True
        >>> fold(0, 1, 2) == fold(0, 2, 1)
        False
    """
    state = seed & _BITS_64
    for counter in (len(counters), *counters):
        state = (state + 0x9E3779B97F4A7C15 + (counter & _BITS_64)) & _BITS_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS_64
        state ^= state >> 31
    return state >> 1


def uniform_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with U[0, 1) noise that depends only on seed and counters.

    Args:
        out: the tensor to fill, by the generator of its device.
        seed: the seed, mixed with the counters by `fold`.
        counters: any number of integers, for example a `Stream` and the index of a layer.

    Returns:
        ``out``.

    Example:
        >>> a = uniform_(torch.empty(3), 0, 7)
        >>> torch.equal(a, uniform_(torch.empty(3), 0, 7))
        True
    """
    return out.uniform_(generator=_generator(out, seed, *counters))


def normal_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with N(0, 1) noise that depends only on seed and counters.

    Args:
        out: the tensor to fill.
        seed: the seed, mixed with the counters by `fold`.
        counters: any number of integers.

    Returns:
        ``out``.

    Example:
        >>> a = normal_(torch.empty(3), 0, Stream.L0_GATES)
        >>> torch.equal(a, normal_(torch.empty(3), 0, Stream.L0_GATES))
        True
    """
    return out.normal_(generator=_generator(out, seed, *counters))


def logistic_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with L = ln u - ln(1 - u), u uniform, which is Logistic(0, 1) noise.

    This is the distribution of g₁ - g₀ for two Gumbel(0, 1) variables, as the paper writes it
    (eq. 3 and algorithm 1, line 7).

    Args:
        out: the tensor to fill.
        seed: the seed, mixed with the counters by `fold`.
        counters: any number of integers.

    Returns:
        ``out``; every entry is finite.

    Example:
        >>> bool(logistic_(torch.empty(1000), 0).isfinite().all())
        True
    """
    u = uniform_(out, seed, *counters).clamp_(_EDGE, 1 - _EDGE)
    complement = torch.log1p(-u)
    return u.log_().sub_(complement)


def draw_key(seed: int, *counters: int) -> tuple[int, int]:
    """Return the key of a draw for `hashed`: the bits of `fold`, as two 32-bit words."""
    key = fold(seed, *counters)
    return key >> 31 & _BITS_32, key & _BITS_32


def hashed(position: Tensor, key: Tensor) -> Tensor:
    """Return 32 random bits, as int64, for each position (int64, taken modulo 2^32).

    For one key (the two words of a `draw_key`) this is a permutation of the 2^32 positions. The
    second word is added after the first multiplication, so the sequences of two keys are not
    shifted copies of each other.
    """
    x = (position + key[0]) & _BITS_32
    x = x ^ (x >> SHIFTS[0])
    x = ((x * MULTIPLIERS[0]) + key[1]) & _BITS_32
    x = x ^ (x >> SHIFTS[1])
    x = (x * MULTIPLIERS[1]) & _BITS_32
    x = x ^ (x >> SHIFTS[2])
    x = (x * MULTIPLIERS[2]) & _BITS_32
    return x ^ (x >> SHIFTS[3])


def uniforms(shape: torch.Size, key: Tensor) -> Tensor:
    """u = (2 k + 1) 2⁻²⁴ with k the upper 23 bits of `hashed` at each row-major position.

    u is never 0 or 1. 1 - u is exact in fp32 and has the same distribution as u.
    """
    bits = hashed(torch.arange(shape.numel(), device=key.device), key)
    return ((bits >> 9) * 2 + 1).to(torch.float32).mul(2.0**-24).view(shape)


def logistic(shape: torch.Size, key: Tensor) -> Tensor:
    """L = ln u - ln(1 - u) with u of `uniforms`, which is Logistic(0, 1) noise."""
    u = uniforms(shape, key)
    return u.log() - (1 - u).log()


def _generator(out: Tensor, seed: int, *counters: int) -> torch.Generator:
    return torch.Generator(device=out.device).manual_seed(fold(seed, *counters))
