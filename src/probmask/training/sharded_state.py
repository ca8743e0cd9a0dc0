"""States of a run whose weights FSDP2 divides: gathered on one rank, or divided again."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from probmask.masking.parametrization import map_tensors
from probmask.masking.sharding import is_dtensor


def whole_state(state: Any, *, keep: bool = True) -> Any:
    """Return a nested state with whole tensors in place of sharded ones. All ranks call this.

    Ranks that do not ``keep`` it hold one whole tensor at a time, and return scalars instead.
    """

    def whole(tensor: Any) -> Any:
        if not is_dtensor(tensor):
            return tensor
        full = tensor.detach().full_tensor()
        return full.cpu() if keep else full.new_zeros(())

    return map_tensors(state, whole)


def divided_like(state: Any, examples: Any) -> Any:
    """Return a nested state whose tensors are divided like those at the same places of another."""
    if isinstance(state, dict):
        return {key: divided_like(item, examples.get(key)) for key, item in state.items()}
    return _divided(state, examples) if isinstance(state, Tensor) else state


def divided_by_shape(state: Any, weights: Sequence[Any]) -> Any:
    """Return a nested state in which tensors with the shape of a weight are divided like it.

    FSDP2 divides all weights by rows, so it does not matter which of several equal shapes is found.
    """
    by_shape = {weight.shape: weight for weight in weights}
    return map_tensors(state, lambda tensor: _divided(tensor, by_shape.get(tensor.shape)))


def _divided(tensor: Tensor, like: Any) -> Tensor:
    if not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole tensor, so that none is sent.
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
