"""Random numbers that are a pure function of a seed and counters, so that nothing has to be stored.

A resumed run, another rank or a recomputed forward pass gets the noise of (seed, counters) by
asking for it again; there is no generator state to save, to restore or to get out of step.
"""

from enum import IntEnum, unique

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
# The fp32 uniforms of PyTorch are multiples of 2^-24: the least step away from 0 and from 1.
_EDGE = 2.0**-24
# Rounds of x ^= x >> shift, x *= multiplier on 32 bits: lowbias32 (C. Wellons), a round longer.
# Multipliers below 2^31: their products with 32 bits do not overflow a signed 64-bit number.
SHIFTS = (16, 15, 15, 14)
MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)
_WORD = 0xFFFFFFFF


@unique
class Stream(IntEnum):
    """Counters of the random streams that do not belong to an update.

    Pass one of these to `fold`, `uniform_`, `logistic_` or `normal_` in the place where the noise
    of an update has the update's number. Update numbers are 0 or more and these are negative and
    unique, so no two streams of one seed share their numbers. Never change or reuse a value: runs
    would no longer reproduce. A new stream gets the next free number.
    """

    SPARSE_START = -1  # random masks of the methods that start sparse
    REINITIALIZATION = -2  # new initial weights of all layers
    PROBE_BATCHES = -3  # batches on which a method measures gradients or curvature
    EDGE_POPUP_SCORES = -4
    GRASP_XAVIER = -5
    L0_GATES = -6
    MLPRUNE_BATCHES = -7
    FINAL_SAMPLE = -8  # the final mask of ProbMask(select="sample")


def fold(seed: int, *counters: int) -> int:
    """Mix a seed with counters into 63 bits; each change of any of them changes all the bits.

    The mixing is SplitMix64's finaliser (Steele, Lea and Flood, 2014), once per counter.
    """
    state = seed & _MASK
    for counter in (len(counters), *counters):
        state = (state + 0x9E3779B97F4A7C15 + (counter & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def uniform_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with uniforms on [0, 1) that depend on nothing but seed and counters."""
    return out.uniform_(generator=_generator(out, seed, *counters))


def normal_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with N(0, 1) noise that depends on nothing but seed and counters."""
    return out.normal_(generator=_generator(out, seed, *counters))


def logistic_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with Logistic(0, 1) noise, L = ln u - ln(1 - u), from one uniform each.

    The difference of two Gumbel(0, 1) variables, which the paper writes, has the same law.
    """
    u = uniform_(out, seed, *counters).clamp_(_EDGE, 1 - _EDGE)
    complement = torch.log1p(-u)
    return u.log_().sub_(complement)


def draw_key(seed: int, *counters: int) -> tuple[int, int]:
    """Two 32-bit words for a draw of one site; each change of a counter changes all their bits."""
    key = fold(seed, *counters)
    return key >> 31 & _WORD, key & _WORD


def hashed(position: Tensor, key: Tensor) -> Tensor:
    """32 bits, as int64, for each position (int64, taken modulo 2^32); ``key`` is a `draw_key`.

    For one key this is a permutation of the 2^32 positions. Its second word comes in after the
    first multiplication: sequences of different keys are no shifted copies of each other.
    """
    x = (position + key[0]) & _WORD
    x = x ^ (x >> SHIFTS[0])
    x = ((x * MULTIPLIERS[0]) + key[1]) & _WORD
    x = x ^ (x >> SHIFTS[1])
    x = (x * MULTIPLIERS[1]) & _WORD
    x = x ^ (x >> SHIFTS[2])
    x = (x * MULTIPLIERS[2]) & _WORD
    return x ^ (x >> SHIFTS[3])


def uniforms(shape: torch.Size, key: Tensor) -> Tensor:
    """u = (2 k + 1) 2⁻²⁴, k of 23 bits, for the row-major positions of a tensor.

    Never 0 nor 1, and 1 - u is exact in fp32 too and as likely as u.
    """
    bits = hashed(torch.arange(shape.numel(), device=key.device), key)
    return ((bits >> 9) * 2 + 1).to(torch.float32).mul(2.0**-24).view(shape)


def logistic(shape: torch.Size, key: Tensor) -> Tensor:
    """L = ln u - ln(1 - u), Logistic(0, 1)."""
    u = uniforms(shape, key)
    return u.log() - (1 - u).log()


def _generator(out: Tensor, seed: int, *counters: int) -> torch.Generator:
    return torch.Generator(device=out.device).manual_seed(fold(seed, *counters))
