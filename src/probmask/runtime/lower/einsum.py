"""Einsum as matrix products, transposes and sums, which have kernels."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

_EINSUM: Any = torch.ops.aten.einsum.default


def decompositions(program: torch.export.ExportedProgram) -> dict[Any, Any]:
    """Return the table that replaces the einsums of a program, if all are products of matrices."""
    graphs = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
    nodes = [node for graph in graphs for node in graph.nodes if node.target is _EINSUM]
    every = all(_is_product(*_terms(str(node.args[0]))) for node in nodes)
    return {_EINSUM: _einsum} if nodes and every else {}


def _einsum(equation: str, operands: Sequence[Tensor]) -> Tensor:
    """Compute the einsum of two tensors as one matrix product.

    Letters of both operands and of the result are batches of matrices, those of both operands only
    are summed over, and those of one operand are its rows or columns.
    """
    (first, second), result = _terms(equation)
    shared = [letter for letter in result if letter in first and letter in second]
    summed = [letter for letter in first if letter in second and letter not in result]
    rows, columns = ([c for c in result if c in own and c not in shared] for own in (first, second))
    sizes = dict(zip(first + second, operands[0].shape + operands[1].shape, strict=True))
    left = _ordered(operands[0], first, (shared, rows, summed), sizes)
    right = _ordered(operands[1], second, (shared, columns, summed), sizes)
    product = torch.matmul(left, right.transpose(-2, -1))
    order = [*shared, *rows, *columns]
    if len(rows) != 1 or len(columns) != 1:
        product = product.reshape([sizes[letter] for letter in order])
    return _permuted(product, [order.index(letter) for letter in result])


def _terms(equation: str) -> tuple[list[str], str]:
    """Return the letters of the operands and those of the result."""
    names, _, result = equation.replace(" ", "").partition("->")
    return names.split(","), result


def _is_product(names: list[str], result: str) -> bool:
    """Return whether two operands without repeated letters are multiplied as batches of matrices.

    A product of single matrices stays as it is: no attention is written so.
    """
    if len(names) != 2 or "." in "".join(names) or not result:
        return False
    first, second = (set(own) for own in names)
    unique = all(len(set(own)) == len(own) for own in (*names, result))
    # A letter of one operand that the result lacks is summed over before the product.
    return (
        unique
        and first ^ second <= set(result) <= first | second
        and bool(first & second & set(result))
    )


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
