"""Einsum as matrix products, transposes and sums, which have kernels."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def einsum(equation: str, operands: Sequence[Tensor], *, path: Sequence[int] | None = None) -> Tensor:
    """Compute `torch.einsum` of two tensors as one matrix product; all others as PyTorch does.

    Letters of both operands and of the result are batches of matrices, those of both operands only
    are summed over, and those of one operand are its rows or columns.
    """
    terms, _, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if not _is_product(names, result):
        return torch.ops.aten.einsum.default(equation, operands, path=path)
    first, second = names
    shared = [letter for letter in result if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in result]
    rows, columns = ([c for c in result if c in own and c not in shared] for own in names)
    sizes = dict(zip(first + second, operands[0].shape + operands[1].shape, strict=True))
    left = _ordered(operands[0], first, (shared, rows, summed), sizes)
    right = _ordered(operands[1], second, (shared, columns, summed), sizes)
    product = torch.matmul(left, right.transpose(-2, -1))
    order = [*shared, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        product = product.reshape([sizes[letter] for letter in order])
    return _permuted(product, [order.index(letter) for letter in result])


def _is_product(names: Sequence[str], result: str) -> bool:
    """Return whether two operands without repeated letters are multiplied as matrices."""
    if len(names) != 2 or "." in "".join(names) or not result:
        return False
    first, second = (set(own) for own in names)
    unique = all(len(set(own)) == len(own) for own in (*names, result))
    # A letter of one operand that the result lacks is summed over before the product.
    return unique and first ^ second <= set(result) <= first | second


def _ordered(
    x: Tensor, names: str, groups: tuple[list[str], list[str], list[str]], sizes: dict[str, int]
) -> Tensor:
    """Return the tensor with the batches of matrices first, then its rows, then what is summed."""
    shared, *others = groups
    moved = _permuted(x, [names.index(letter) for group in groups for letter in group])
    if all(len(group) == 1 for group in others):
        return moved
    lengths = [prod(sizes[letter] for letter in group) for group in others]
    return moved.reshape([sizes[letter] for letter in shared] + lengths)


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    return x if order == sorted(order) else x.permute(order)
