"""Functions that models write out in several operations: RMSNorm, and GELU with tanh."""

from collections.abc import Callable
from math import isclose, pi, sqrt
from typing import Any

import torch
from torch import fx

from probmask.runtime.lower.graph import arguments_of

_aten = torch.ops.aten


def rms_norm(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return x and epsilon if a product is x · rsqrt(mean(x²) + epsilon)."""
    for x, factor in (node.args[:2], node.args[1::-1]):
        epsilon = _mean_square_epsilon(x, factor) if isinstance(x, fx.Node) else None
        if epsilon is not None:
            assert isinstance(x, fx.Node)
            return x, epsilon
    return None


def _mean_square_epsilon(x: fx.Node, factor: Any) -> float | None:
    """Return epsilon if the factor is rsqrt(mean(x²) + epsilon) over the last dimension."""
    shifted = _argument_of(factor, _aten.rsqrt.default)
    if shifted is None or shifted.target is not _aten.add.Tensor:
        return None
    mean, epsilon = shifted.args[:2]
    square = _argument_of(mean, _aten.mean.dim)
    if not isinstance(epsilon, float) or square is None or not isinstance(mean, fx.Node):
        return None
    arguments = arguments_of(mean)
    last = x.meta["val"].dim() - 1
    over_last = [dim % (last + 1) for dim in arguments["dim"]] == [last]
    squared = square.target is _aten.pow.Tensor_Scalar and square.args == (x, 2)
    squared = squared or (square.target is _aten.mul.Tensor and square.args == (x, x))
    return epsilon if squared and over_last and arguments["keepdim"] else None


def tanh_gelu(node: fx.Node) -> fx.Node | None:
    """Return x if a product is 0.5 x · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    half, shifted = node.args[:2]
    x = _times(half, 0.5)
    tanh = _plus(shifted, 1.0)
    inner = _times(_argument_of(tanh, _aten.tanh.default), sqrt(2 / pi))
    if x is None or inner is None or inner.target is not _aten.add.Tensor:
        return None
    first, cubic = inner.args[:2]
    cube = _times(cubic, 0.044715)
    is_cube = cube is not None and cube.target is _aten.pow.Tensor_Scalar
    return x if first is x and is_cube and cube is not None and _is_cube_of(cube, x) else None


def _is_cube_of(cube: fx.Node, x: fx.Node) -> bool:
    base, power = cube.args[:2]
    return base is x and power in (3, 3.0)


def _times(node: Any, number: float) -> fx.Node | None:
    """Return the other factor of a product with a number."""
    return _other(node, _aten.mul.Tensor, number)


def _plus(node: Any, number: float) -> fx.Node | None:
    """Return the other term of a sum with a number."""
    return _other(node, _aten.add.Tensor, number)


def _other(node: Any, target: Callable[..., Any], number: float) -> fx.Node | None:
    first = _argument_of(node, target)
    second = node.args[1] if first is not None else None
    matches = isinstance(second, int | float) and isclose(second, number, rel_tol=1e-6)
    return first if matches else None


def _argument_of(node: Any, target: Callable[..., Any]) -> fx.Node | None:
    """Return the first argument of an operation of this kind."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None
