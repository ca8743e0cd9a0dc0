"""A copy of a model for inference."""

import copy

from torch import nn
from torch.nn.parameter import is_lazy

from probmask.errors import InputError
from probmask.masking.freeze_masks import check_not_rounding
from probmask.masking.sites import check_not_pruned_by_torch
from probmask.masking.zeros import warn_if_filled
from probmask.messages import one_line


def frozen(model: nn.Module, caller: str) -> nn.Module:
    """Return a copy of the model in evaluation mode, without gradients, on the CPU."""
    check_not_pruned_by_torch(caller, model)
    check_not_rounding(caller, model)
    warn_if_filled(caller, model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            raise InputError(
                f"{caller}({type(model).__name__}): {name} has no values yet; load the "
                "weights first, or pass one batch through the model if it is lazy."
            )
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # a model can hold anything
        reason = one_line(error)[:300]
        if "weight_norm" in reason:  # PyTorch's message of a weight that a hook computes
            reason = "a module computes its weight; remove weight_norm with remove_weight_norm."
        raise InputError(
            f"{caller}({type(model).__name__}): the model cannot be copied: {reason}"
        ) from error
    return copied.cpu().eval().requires_grad_(False)
