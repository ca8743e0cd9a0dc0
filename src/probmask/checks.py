"""Checks of values that people pass in: each refuses with the value, the rule and a way out."""

import math
import sys
from collections.abc import Sequence

from probmask.errors import InputError


def is_number(value: object) -> bool:
    """Whether the value is a finite real number that a float can hold (a bool is not one)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # which NaN is not, either


def check_sparsity(caller: str, sparsity: object) -> None:
    """Refuse a sparsity outside [0, 1), and say what is probably meant."""
    if is_number(sparsity):
        assert isinstance(sparsity, int | float)
        if 0 <= sparsity < 1:
            return
        hint = f"; for {sparsity:g} % pass {sparsity / 100:g}" if 2 <= sparsity < 100 else ""
    else:
        hint = _no_number(sparsity)
    raise InputError(
        f"{caller}(sparsity={sparsity!r}): sparsity is the fraction removed, in [0, 1){hint}."
    )


def check_choice(caller: str, name: str, value: object, choices: Sequence[object]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InputError(f"{caller}({name}={value!r}): one of {listed}.")


def check_within(
    caller: str, name: str, value: object, low: float, high: float, *, meaning: str
) -> None:
    """Refuse a number outside [low, high]."""
    if is_number(value):
        assert isinstance(value, int | float)
        if low <= value <= high:
            return
    bounds = f"at least {low:g}" if math.isinf(high) else f"from {low:g} to {high:g}"
    raise InputError(f"{caller}({name}={value!r}): {meaning}, {bounds}{_no_number(value)}.")


def _no_number(value: object) -> str:
    """That a value has the wrong type, if it has."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if right else f"; {value!r} is no number"


def check_ramp(caller: str, *, meaning: str, **ends: float) -> None:
    """Refuse a stretch of the training, given by its two ends, that is outside it or backwards."""
    for name, value in ends.items():
        check_within(caller, name, value, 0, 1, meaning="a part of the training")
    begin, end = ends.values()
    if begin > end:
        given = ", ".join(f"{name}={value}" for name, value in ends.items())
        raise InputError(
            f"{caller}({given}): {meaning} from begin to end; begin must not come after end."
        )


def check_count(caller: str, name: str, value: object, *, least: int, meaning: str) -> None:
    """Refuse what is not a whole number of at least ``least``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return
    raise InputError(f"{caller}({name}={value!r}): {meaning}, a whole number, at least {least}.")
