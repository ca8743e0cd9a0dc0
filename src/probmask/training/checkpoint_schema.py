"""The schema of a checkpoint: type, shape and range of every field, checked before any is used.

A rule is a function of a value and its `Field`. It returns if the value fits, and raises a
`CheckpointError` that names the file and the field if it does not. The rules follow from the run
that is resumed: its network, its optimizers and the state that its method has before training.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from probmask.errors import CheckpointError
from probmask.masking.sharding import rows_of
from probmask.masking.sparsifier import Sparsifier
from probmask.messages import printable, shown
from probmask.optim import without_ham
from probmask.training.quantization import Quantizer

_MAX_SHOWN = 60  # characters of a value or a key in a message
_HUGE = 2**64  # more than any integer that a run stores


@dataclass(frozen=True)
class Field:
    """A field of a checkpoint, for messages: the file, and the dotted name of the field."""

    path: Path
    name: str = ""

    def __getitem__(self, key: object) -> "Field":
        name = printable(key)[:_MAX_SHOWN] if isinstance(key, str) else _shown(key)
        return Field(self.path, f"{self.name}.{name}" if self.name else name)

    def error(self, problem: str) -> CheckpointError:
        """Return the error for a field that does not fit the run."""
        return CheckpointError(
            f"{self.path}: {self.name or 'the state'} {problem}, so the checkpoint does not fit "
            "this run; restore it from a copy, restore the code of the model that wrote it, or "
            "start a new run with another --out."
        )


Rule = Callable[[Any, Field], None]


def anything(_: Any, __: Field) -> None:
    """Accept every value, for fields that are compared elsewhere."""


def text(value: Any, field: Field) -> None:
    """Accept a text."""
    if not isinstance(value, str):
        raise _expected("a text", value, field)


def plain(value: Any, field: Field) -> None:
    """Accept what TOML can represent: texts, numbers, true, false, lists and tables of these."""
    if isinstance(value, Mapping):
        table_of(text, plain)(value, field)
    elif isinstance(value, list):
        list_of(plain)(value, field)
    elif not isinstance(value, str | int | float):
        raise _expected("a setting", value, field)


def number(low: float = -math.inf, high: float = math.inf) -> Rule:
    """Accept a number from ``low`` to ``high``."""

    def check(value: Any, field: Field) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _expected("a number", value, field)
        too_large = isinstance(value, int) and abs(value) >= 2**63  # for PyTorch
        if too_large or not low <= value <= high:  # NaN too
            raise _expected(f"a number from {low:,} to {high:,}", value, field)

    return check


def whole_number(low: int = -_HUGE, high: int = _HUGE) -> Rule:
    """Accept an integer from ``low`` to ``high``."""

    def check(value: Any, field: Field) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _expected(f"a whole number from {low:,} to {high:,}", value, field)

    return check


def truth(value: Any, field: Field) -> None:
    """Accept True or False."""
    if not isinstance(value, bool):
        raise _expected("true or false", value, field)


def tensor(like: Tensor, *, finite: bool = False) -> Rule:
    """Accept a tensor of the shape and type of ``like``, without NaN; or only finite values."""
    return shaped_tensor(like.shape, like.dtype, finite=finite)


def shaped_tensor(
    shape: Sequence[int], dtype: torch.dtype, *, finite: bool = False, low: float = -math.inf
) -> Rule:
    """Accept a tensor of this shape and type, whose values are at least ``low`` and not NaN.

    If it is sharded, only the rows of this rank are examined.
    """
    kind = _kind(shape, dtype)

    def check(value: Any, field: Field) -> None:
        if not isinstance(value, Tensor):
            raise _expected(kind, value, field)
        if value.shape != torch.Size(shape) or value.dtype != dtype:
            raise _expected(kind, value, field)
        if not dtype.is_floating_point:
            return
        rows = rows_of(value)
        if rows.isnan().any() or (finite and not rows.isfinite().all()):
            raise field.error("contains values that are not finite")
        if low > -math.inf and (rows < low).any():
            raise field.error(f"contains values below {low:g}")

    return check


def rows_of_sums(value: Any, field: Field) -> None:
    """Accept three sums over an epoch for each of any number of ranks, or for the first one."""
    rows = value.shape[0] if isinstance(value, Tensor) and value.dim() == 2 else None
    shape = (3,) if rows is None else (rows, 3)
    shaped_tensor(shape, torch.float64, finite=True)(value, field)


def table(rules: Mapping[Any, Rule]) -> Rule:
    """Accept a table with exactly these keys."""

    def check(value: Any, field: Field) -> None:
        if not isinstance(value, Mapping):
            raise _expected("a table", value, field)
        for key in rules:
            if key not in value:
                raise field[key].error("is missing")
        for key in value:
            if key not in rules:
                raise field[key].error("is unknown")
        for key, rule in rules.items():
            rule(value[key], field[key])

    return check


def table_of(key_rule: Rule, rule: Rule) -> Rule:
    """Accept a table with any keys and values that fit these rules."""

    def check(value: Any, field: Field) -> None:
        if not isinstance(value, Mapping):
            raise _expected("a table", value, field)
        for key, item in value.items():
            key_rule(key, field[key])
            rule(item, field[key])

    return check


def items(rules: Sequence[Rule], kind: type[list[Any] | tuple[Any, ...]] = list) -> Rule:
    """Accept a list with one item for each of these rules."""

    def check(value: Any, field: Field) -> None:
        if not isinstance(value, kind) or len(value) != len(rules):
            raise _expected(f"a list of {len(rules)} items", value, field)
        for index, (rule, item) in enumerate(zip(rules, value, strict=True)):
            rule(item, field[index])

    return check


def list_of(rule: Rule) -> Rule:
    """Accept a list of any length whose items fit the rule."""

    def check(value: Any, field: Field) -> None:
        if not isinstance(value, list):
            raise _expected("a list", value, field)
        for index, item in enumerate(value):
            rule(item, field[index])

    return check


def optional(rule: Rule) -> Rule:
    """Accept None and what fits the rule."""

    def check(value: Any, field: Field) -> None:
        if value is not None:
            rule(value, field)

    return check


def same(example: Any) -> Rule:
    """Accept nested tables, lists, texts and numbers that equal the example's, and no others."""

    def check(value: Any, field: Field) -> None:
        if isinstance(example, Mapping):
            table({key: same(item) for key, item in example.items()})(value, field)
        elif isinstance(example, list | tuple):
            items([same(item) for item in example], type(example))(value, field)
        elif type(value) is not type(example) or value != example:
            raise _expected(_shown(example), value, field)

    return check


def model_state(state: Mapping[str, Any]) -> Rule:
    """Accept the state of a network whose current state is ``state``."""
    return table({key: _extra_or_tensor(value) for key, value in state.items()})


def _extra_or_tensor(value: Any) -> Rule:
    # Other values are the extra state of a module, whose format only the module knows.
    return tensor(value) if isinstance(value, Tensor) else anything


def stored_values(value: Any, field: Field) -> None:
    """Accept nested tables and lists of anything that a checkpoint stores, without NaN."""
    if isinstance(value, Mapping):
        table_of(anything, stored_values)(value, field)
    elif isinstance(value, list | tuple):
        items([stored_values] * len(value), type(value))(value, field)
    elif isinstance(value, Tensor):
        tensor(value)(value, field)


def optimizer_state(
    optimizer: Optimizer,
    build: Callable[[list[Tensor]], Optimizer] | None = None,
    shapes: Mapping[int, torch.Size] = MappingProxyType({}),
) -> Rule:
    """Accept a state of this optimizer: its groups, and the tensors of its parameters.

    ``build`` returns an optimizer with the same settings; without it, the settings are the
    optimizer's defaults. ``shapes`` has the shapes of the whole parameters, by the id of those that
    are rows of them.
    """
    build = build or _same_class(optimizer)
    groups = optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state_of = {
        index: _parameter_state(build, shapes.get(id(p), p.shape), p.dtype)
        for index, p in enumerate(parameters)
    }

    def state(value: Any, field: Field) -> None:
        if not isinstance(value, Mapping):
            raise _expected("a table", value, field)
        for key, item in value.items():
            if isinstance(key, bool) or key not in state_of:
                raise field[key].error("belongs to no parameter")
            state_of[key](item, field[key])

    rate = number(0, 1e38)  # the only setting that changes during training
    group_rules = [
        table({key: rate if key == "lr" else same(value) for key, value in group.items()})
        for group in groups
    ]
    return table({"state": state, "param_groups": items(group_rules)})


def _same_class(optimizer: Optimizer) -> Callable[[list[Tensor]], Optimizer]:
    optimizer = without_ham(optimizer)
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}
    return lambda parameters: kind(parameters, **defaults)


def _parameter_state(
    build: Callable[[list[Tensor]], Optimizer], shape: torch.Size, dtype: torch.dtype
) -> Rule:
    """Return the rule of the state of one parameter: what a step of such an optimizer leaves."""
    example = torch.zeros(shape, dtype=dtype)
    example.grad = torch.zeros_like(example)
    trial = build([example])
    trial.step()
    rules: dict[str, Rule] = {}
    for key, value in trial.state[example].items():
        if isinstance(value, Tensor):
            low = 0.0 if key == "step" else -math.inf
            rules[key] = shaped_tensor(value.shape, value.dtype, finite=True, low=low)
        else:
            rules[key] = anything if value is None else number(0)
    return table(rules)


def sparsifier_state(sparsifier: Sparsifier, model: nn.Module, *, step: int) -> Rule:
    """Accept a state of the sparsifier after ``step`` updates, before any update is made."""
    now = sparsifier.state_dict()
    method, sites = now["method"], sparsifier.sites
    trained = zip(sparsifier.own_parameters, chain.from_iterable(method["trained"]), strict=True)
    shapes = {id(parameter): whole.shape for parameter, whole in trained}
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    site_rules = [
        table(
            {
                "mask": optional(shaped_tensor(site.weight.shape, torch.bool)),
                "values": _site_values(saved["values"], site.weight),
            }
        )
        for site, saved in zip(sites, method["sites"], strict=True)
    ]
    method_rules = {
        "values": _method_values(method["values"], [site.weight for site in sites], tensors),
        "sites": items(site_rules),
        "trained": items(
            [items([tensor(t, finite=True) for t in site]) for site in method["trained"]]
        ),
    }
    return table(
        {
            "step": same(step),
            "training": same(now["training"]),
            "shapes": same(now["shapes"]),
            "method": table(method_rules),
            "trainables": items(
                [optimizer_state(each, shapes=shapes) for each in sparsifier.own_optimizers]
            ),
        }
    )


def quantizer_state(quantizer: Quantizer) -> Rule:
    """Accept a state of the quantizer: its masks."""
    masks = {name: shaped_tensor(mask.shape, torch.bool) for name, mask in quantizer.masks.items()}
    return table({"masks": table(masks)})


def _site_values(before: Mapping[str, Any], weight: Tensor) -> Rule:
    """Accept the attributes that a method saves of a site, given their values before training.

    An attribute that is None before training may become a tensor like the weight.
    """
    rules: dict[str, Rule] = {
        name: optional(tensor(weight)) if value is None else _like(value)
        for name, value in before.items()
    }
    return table(rules)


def _method_values(
    before: Mapping[str, Any], weights: Sequence[Tensor], tensors: Mapping[str, Tensor]
) -> Rule:
    """Accept the attributes that a method saves, given their values before training.

    An attribute that is None before training may become a number, or a list with a number or a pair
    of numbers for each weight. In a list with an item for each weight, None may become a tensor. A
    table may have a copy of each of ``tensors``.
    """
    numbers = items([_number_or_pair] * len(weights))

    def set_later(value: Any, field: Field) -> None:
        (numbers if isinstance(value, list) else optional(number()))(value, field)

    def rule(value: Any) -> Rule:
        if value is None:
            return set_later
        if isinstance(value, dict):
            return _all_or_none({name: tensor(each) for name, each in tensors.items()})
        if isinstance(value, list):
            pairs = zip(value, weights, strict=True)
            return items([optional(tensor(w)) if v is None else _like(v) for v, w in pairs])
        return _like(value)

    return table({name: rule(value) for name, value in before.items()})


def _like(value: Any) -> Rule:
    """Accept a value of the type, and for tensors of the shape, of this one."""
    if isinstance(value, Tensor):
        return tensor(value)
    rules: dict[type, Rule] = {bool: truth, int: whole_number(), float: optional(number())}
    return rules[type(value)]


def _number_or_pair(value: Any, field: Field) -> None:
    (items([number()] * 2, tuple) if isinstance(value, tuple) else number())(value, field)


def _all_or_none(rules: Mapping[str, Rule]) -> Rule:
    def check(value: Any, field: Field) -> None:
        if value != {}:
            table(rules)(value, field)

    return check


def _expected(what: str, value: Any, field: Field) -> CheckpointError:
    found = _kind(value.shape, value.dtype) if isinstance(value, Tensor) else _shown(value)
    return field.error(f"is {found}, expected {what}")


def _kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"a tensor of shape {tuple(shape)} and type {str(dtype).removeprefix('torch.')}"


def _shown(value: object) -> str:
    """Return a short text for a value of any size."""
    kinds: dict[type, str] = {dict: "a table", list: "a list", tuple: "a tuple"}
    return kinds.get(type(value), printable(shown(value, _MAX_SHOWN)))
