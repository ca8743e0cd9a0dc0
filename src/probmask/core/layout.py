"""The order in which a tensor's entries lie in memory: row-major, channels last, or any other."""

from torch import Tensor


def storage_order(tensor: Tensor) -> list[int]:
    """Its dimensions from the slowest to the fastest: so permuted, a dense tensor is contiguous."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def as_stored(*tensors: Tensor) -> list[Tensor] | None:
    """All entries of each as a vector, in the order in memory that the tensors have in common.

    Views: what is written to them is written to the tensors. None if they lie in different orders,
    or with gaps.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = storage_order(tensors[0])
        tensors = tuple(tensor.permute(order) for tensor in tensors)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]
