"""Masks for a model whose weights a trainer has already loaded from a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from probmask.masking.sparsifier import Sparsifier


def attach_resumed(
    model: nn.Module, attach: Callable[[], Sparsifier], state: Mapping[str, Any]
) -> Sparsifier:
    """Attach the masks and load their state, without changing the model's weights.

    Some methods zero or reinitialize weights when they are attached. The trainers load weights
    before that, so they are restored here.
    """
    loaded = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    sparsifier = attach()
    with torch.no_grad():
        for parameter, value in loaded:
            parameter.copy_(value)
    sparsifier.load_state_dict(state)
    return sparsifier
