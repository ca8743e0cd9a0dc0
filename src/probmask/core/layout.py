"""The order in which a tensor's entries lie in memory: row-major, channels last, or any other."""

from torch import Tensor


def as_stored(*tensors: Tensor) -> list[Tensor] | None:
    """All entries of each as a vector, in the order in memory that the tensors have in common.

    Views: what is written to them is written to the tensors. None if they lie in different orders,
    or with gaps.
    """
    first = tensors[0]
    if not all(tensor.is_contiguous() for tensor in tensors):
        order = sorted(range(first.dim()), key=first.stride, reverse=True)
        tensors = tuple(tensor.permute(order) for tensor in tensors)
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
    return [tensor.view(-1) for tensor in tensors]
