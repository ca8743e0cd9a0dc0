"""Checks of values that users pass: settings in dataclasses, and single arguments.

A dataclass states its constraints in its annotations, and `check_fields` enforces them all:

    scope: Literal["global", "layer"] = "global"
    stop_at: TrainingFraction = 0.75
    update_every: Annotated[int, Range(1, meaning="a number of updates")] | None = None

Pydantic would do this too, but not without a dependency of the core package, and its errors cannot
say "ProbMask(sparsity=98): … for 98 % pass 0.98".
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from probmask.errors import InputError
from probmask.messages import shown


@dataclass(frozen=True)
class Range:
    """Constraint on a number: from ``low`` to ``high``, both included.

    ``meaning`` describes the number in error messages.
    """

    low: float
    high: float = math.inf
    meaning: str = "a number"


Sparsity = Annotated[float, "sparsity"]
TrainingFraction = Annotated[float, Range(0, 1, "a fraction of the training")]
GradientFraction = Annotated[float, Range(0, 1, "a fraction of the gradient")]
InitialFraction = Annotated[float, Range(0, 1, "a fraction of the initial values")]
LayerFraction = Annotated[float, Range(0, 1, "a fraction of a layer")]
Temperature = Annotated[float, Range(1e-3, 1, "a temperature")]
Positive = Annotated[float, Range(1e-9, meaning="a positive number")]
Momentum = Annotated[float, Range(0, 0.999, "the momentum of SGD")]
Updates = Annotated[int, Range(1, meaning="a number of updates")]
WeightCount = Annotated[int, Range(0, meaning="a number of weights")]


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass against its annotation.

    Supported annotations are ``bool``, ``str``, ``Literal``, numbers, ``Annotated`` numbers with a
    `Range`, and unions of these with None.

    Raises:
        InputError: If a value breaks its rule. The message names class, field, value and rule.
    """
    caller = type(settings).__name__
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        check_value(caller, field.name, getattr(settings, field.name), hints[field.name])


def check_value(caller: str, name: str, value: object, hint: Any) -> None:
    """Check one value against an annotation; see `check_fields`."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None and NoneType in kinds:
        return
    (kind,) = [kind for kind in kinds if kind is not NoneType]
    base, *constraints = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if "sparsity" in constraints:
        check_sparsity(caller, value)
    elif get_origin(base) is Literal or base is bool:
        none = (None,) if NoneType in kinds else ()
        choices = (True, False) if base is bool else get_args(base)
        check_choice(caller, name, value, (*none, *choices))
    elif base in (int, float):
        rule = constraints[0] if constraints else Range(-math.inf)
        _check_number(caller, name, value, base, rule)
    elif not isinstance(value, base):
        raise InputError(f"{caller}({name}={shown(value)}): expected a {base.__name__}.")


def _check_number(caller: str, name: str, value: object, base: type, rule: Range) -> None:
    if base is int:
        check_count(caller, name, value, least=int(rule.low), meaning=rule.meaning)
        if math.isinf(rule.high):
            return
    check_within(caller, name, value, rule.low, rule.high, meaning=rule.meaning)


def check_order(settings: Any, *names: str) -> None:
    """Check that the named fields do not decrease, in the given order.

    Raises:
        InputError: If a field is smaller than the field before it.
    """
    values = [getattr(settings, name) for name in names]
    if any(later < earlier for earlier, later in pairwise(values)):
        given = ", ".join(
            f"{name}={shown(value)}" for name, value in zip(names, values, strict=True)
        )
        raise InputError(f"{type(settings).__name__}({given}): the values must not decrease.")


def is_number(value: object) -> bool:
    """Return whether the value is a finite number that a float can hold; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # false for NaN too


def check_sparsity(caller: str, sparsity: object) -> None:
    """Raise an `InputError` for a sparsity outside [0, 1), with a hint for percentages."""
    if is_number(sparsity):
        assert isinstance(sparsity, int | float)
        if 0 <= sparsity < 1:
            return
        hint = f"; for {sparsity:g} % pass {sparsity / 100:g}" if 2 <= sparsity < 100 else ""
    else:
        hint = _wrong_type(sparsity)
    raise InputError(
        f"{caller}(sparsity={shown(sparsity)}): sparsity is the fraction pruned, in [0, 1){hint}."
    )


def check_choice(caller: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise an `InputError` for a value that is not one of the choices."""
    if not any(
        value is choice or (value == choice and type(value) is type(choice)) for choice in choices
    ):
        listed = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{caller}({name}={shown(value)}): must be one of {listed}.")


def check_within(
    caller: str, name: str, value: object, low: float, high: float, *, meaning: str
) -> None:
    """Raise an `InputError` for anything but a number from ``low`` to ``high``."""
    if is_number(value):
        assert isinstance(value, int | float)
        if low <= value <= high:
            return
    if math.isinf(low):
        bounds = ""
    else:
        bounds = f", at least {low:g}" if math.isinf(high) else f", from {low:g} to {high:g}"
    raise InputError(
        f"{caller}({name}={shown(value)}): must be {meaning}{bounds}{_wrong_type(value)}."
    )


def check_count(caller: str, name: str, value: object, *, least: int, meaning: str) -> None:
    """Raise an `InputError` for anything but an integer from ``least`` to 2⁶³ - 1."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        if value < 2**63:
            return
        raise InputError(f"{caller}({name}={shown(value)}): must be {meaning}, less than 2^63.")
    raise InputError(
        f"{caller}({name}={shown(value)}): must be {meaning}, an integer of at least {least}."
    )


def _wrong_type(value: object) -> str:
    right = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if right else f"; {shown(value)} is not a number"
