"""Kaiming initialization by seed, for methods that redraw the weights."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from probmask.core.noise import Stream, fold
from probmask.core.shards import WHOLE
from probmask.errors import InputError
from probmask.masking.sharding import shards_of
from probmask.masking.sites import Site, is_transformers_conv1d


def check_fan_in(caller: str, advice: str, sites: Sequence[Site]) -> None:
    """Raise an `InputError` for a site without a fan-in, which Kaiming's initialization needs."""
    for site in sites:
        if site.weight.dim() < 2:
            raise InputError(
                f"{caller}: {site.name} has {site.weight.dim()} dimension and therefore no fan-in "
                f"to initialize it by; exclude it or {advice}."
            )


def kaiming_normal_(sites: Sequence[Site], seed: int) -> None:
    """Draw every weight from N(0, 2 / fan_in)."""
    shards = shards_of([site.weight for site in sites])
    for index, site in enumerate(sites):
        generator = torch.Generator(device=site.rows.device)
        generator.manual_seed(fold(seed, Stream.REINITIALIZATION, index))
        deviation = math.sqrt(2) / math.sqrt(fan_in(site))
        if shards is WHOLE:
            nn.init.normal_(site.weight, std=deviation, generator=generator)
            continue
        whole = torch.empty(site.shape, dtype=site.rows.dtype, device=site.rows.device)
        nn.init.normal_(whole, std=deviation, generator=generator)
        site.rows.copy_(shards.part(whole))


def fan_in(site: Site) -> int:
    """Return the number of inputs of each output of a layer, as PyTorch counts them.

    PyTorch takes the first dimension for the outputs, in transposed convolutions too.
    """
    outputs = site.weight.shape[int(is_transformers_conv1d(site.holders[0][0]))]
    return site.size // outputs if site.weight.dim() > 1 else site.size


def fix_weights(sites: Sequence[Site]) -> None:
    """Exclude the weights from training: a supermask selects among unchanged weights."""
    for site in sites:
        site.weight.requires_grad_(False)
        site.weight.grad = None
