"""Random numbers that are a pure function of a seed and counters, so that nothing has to be stored.

A resumed run, another rank or a recomputed forward pass gets the noise of (seed, counters) by
asking for it again; there is no generator state to save, to restore or to get out of step.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
# The fp32 uniforms of PyTorch are multiples of 2^-24: the least step away from 0 and from 1.
_EDGE = 2.0**-24


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


def _generator(out: Tensor, seed: int, *counters: int) -> torch.Generator:
    return torch.Generator(device=out.device).manual_seed(fold(seed, *counters))
