"""What there is to choose from: every network with its size and its cost."""

from typing import Any

import torch

from probmask.masking.macs import count_macs
from probmask.masking.sites import find_sites
from probmask.models import MODELS, Network, build_model


def describe_models() -> list[dict[str, Any]]:
    """Describe each network as it is by default, once per number of classes it is listed for.

    ``layers`` and ``weights`` are what can be masked, ``parameters`` all there is; ``macs`` are for
    one image, ``pooling_macs`` come on top. Nothing is computed, so this takes no memory.
    """
    return [
        _describe(name, network, classes)
        for name, network in MODELS.items()
        for classes in network.classes
    ]


def _describe(name: str, network: Network, classes: int) -> dict[str, Any]:
    channels, *image_size = network.image_shape
    suggested = {"classes": classes, "channels": channels, "image_size": image_size}
    with torch.device("meta"):
        model = build_model(name, {}, suggested=suggested)
        example = torch.empty(1, *network.image_shape)
    sites = find_sites(model)
    macs = count_macs(model, sites, example)
    return {
        "name": name,
        "summary": network.summary,
        "image_shape": list(network.image_shape),
        "classes": classes,
        "layers": len(sites),
        "weights": sum(site.size for site in sites),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "macs": macs.dense,
        "pooling_macs": macs.pooling,
    }
