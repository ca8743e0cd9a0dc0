"""Call a model with a batch of inputs: one tensor, or a mapping of keyword arguments.

The models of Hugging Face take keyword arguments and return a mapping with the key ``logits``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def call_model(model: nn.Module, inputs: Any, *, weights: dict[str, Tensor] | None = None) -> Any:
    """Return the model's outputs; of a mapping with logits, the logits.

    Args:
        model: The model.
        inputs: What it takes: keyword arguments if it is a mapping, otherwise one argument.
        weights: Tensors that replace those of the model in this call.
    """
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
    if weights is None:
        outputs = model(*args, **kwargs)
    else:
        outputs = functional_call(model, weights, args, kwargs)
    return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs


def move_inputs(inputs: Any, device: torch.device | None) -> Any:
    """Return the inputs with all tensors on the device."""
    if isinstance(inputs, Mapping):
        return {name: move_inputs(value, device) for name, value in inputs.items()}
    return inputs.to(device) if isinstance(inputs, Tensor) else inputs
