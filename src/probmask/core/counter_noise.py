"""Uniforms that are a pure function of a key and a position: stored nowhere, computed at will.

Unlike a generator's, they are the same bits on every device and in compiled code, and a backward
pass that needs the noise of its forward pass computes it once more instead of keeping it.
"""

import torch
from torch import Tensor

from probmask.core.noise import fold

# Rounds of x ^= x >> shift, x *= multiplier on 32 bits: lowbias32 (C. Wellons), a round longer.
# Multipliers below 2^31: their products with 32 bits do not overflow a signed 64-bit number.
SHIFTS = (16, 15, 15, 14)
MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x31848BAB)
_WORD = 0xFFFFFFFF


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
