"""A network as if it had been trained to a sparsity: random masks, BatchNorm that fits them."""

from collections.abc import Sequence

import torch
from torch import nn

from probmask.core.selection import select_top
from probmask.masking.batchnorm import reestimate_batchnorm
from probmask.masking.sites import find_sites


def mask_at_random_(
    model: nn.Module, sparsity: float, input_shape: Sequence[int], *, seed: int = 0
) -> tuple[int, int]:
    """Remove exactly the sparsity of all weights, each as likely; return how many stay of how many.

    Statistics of BatchNorm are then those of noise as input, so that activations neither vanish nor
    explode: numbers too small for their format would make every engine look slow.
    """
    generator = torch.Generator().manual_seed(seed)
    sites = find_sites(model)
    total = sum(site.size for site in sites)
    keep = total - round(sparsity * total)
    order = [torch.rand(site.shape, generator=generator, dtype=torch.float64) for site in sites]
    with torch.no_grad():
        for site, mask in zip(sites, select_top(order, keep), strict=True):
            site.weight.masked_fill_(~mask.bool(), 0.0)  # a product could be -0
    noise = torch.randn(8, *input_shape, generator=generator)
    reestimate_batchnorm(model, [noise])
    model.eval()
    return keep, total
