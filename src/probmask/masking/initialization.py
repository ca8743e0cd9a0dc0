"""Drawing the weights of sites anew."""

from collections.abc import Sequence

import torch
from torch import nn

from probmask.core.noise import fold
from probmask.errors import InputError
from probmask.masking.sites import Site

# A counter that keeps this stream of random numbers apart from the noise of masks.
_WEIGHTS = -2


def check_fans(caller: str, sites: Sequence[Site]) -> None:
    """Refuse sites that Kaiming's distribution is not defined for."""
    for site in sites:
        if site.weight.dim() < 2:
            raise InputError(
                f"{caller}: {site.name} has {site.weight.dim()} dimension and so no fan-in to draw "
                "it by; exclude it or pass reinitialize=False."
            )


def kaiming_normal_(sites: Sequence[Site], seed: int) -> None:
    """Draw every weight from N(0, 2 / fan_in), as a function of the seed alone."""
    for index, site in enumerate(sites):
        generator = torch.Generator(device=site.weight.device)
        generator.manual_seed(fold(seed, _WEIGHTS, index))
        nn.init.kaiming_normal_(
            site.weight, mode="fan_in", nonlinearity="relu", generator=generator
        )
