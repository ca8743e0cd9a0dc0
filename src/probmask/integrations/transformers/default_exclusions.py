"""What stays dense by default in a model of transformers: embeddings, pooler and head."""

import contextlib

from torch import nn
from transformers import PreTrainedModel


def default_exclude(model: nn.Module) -> list[str]:
    """Return the names of the parameters that stay dense by default: embeddings, pooler, head.

    The head is everything outside ``model.base_model``. A model that is not from transformers has
    none of them, except embeddings.
    """
    dense: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    dense += [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ("embeddings", "pooler")
    ]
    inside = set(map(id, model.parameters()))
    if isinstance(model, PreTrainedModel):
        inside = set(map(id, model.base_model.parameters()))
        dense += _ends(model)
    found = {id(parameter) for module in dense for parameter in module.parameters()}
    return [
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in found or id(parameter) not in inside
    ]


def _ends(model: PreTrainedModel) -> list[nn.Module]:
    """Return the input and output embeddings, if the model has them."""
    found = []
    for get in (model.get_input_embeddings, model.get_output_embeddings):
        with contextlib.suppress(NotImplementedError):  # a network for images or sound
            found.append(get())
    return [module for module in found if module is not None]
