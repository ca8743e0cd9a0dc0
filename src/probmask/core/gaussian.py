"""Normal noise that is a pure function of a seed and counters."""

import torch
from torch import Tensor

from probmask.core.noise import fold


def normal_(out: Tensor, seed: int, *counters: int) -> Tensor:
    """Fill ``out`` with N(0, 1) noise that depends on nothing but seed and counters."""
    generator = torch.Generator(device=out.device)
    generator.manual_seed(fold(seed, *counters))
    return out.normal_(generator=generator)
