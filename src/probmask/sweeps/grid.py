"""The grid of a sweep: one configuration for every combination of the values it lists.

[run]     what all runs have in common, as in the file of a single run
[grid]    lists of values: methods, sparsities, seeds, any key; [[grid]] for several grids
"""

import copy
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probmask.analysis.identity import method_label, run_identity
from probmask.errors import InputError
from probmask.messages import suggestion
from probmask.methods import METHODS
from probmask.parsing import read_toml
from probmask.training.config import TrainConfig, assign, complete_config, make_method
from probmask.training.origins import Origins

_LONGEST_LABEL = 60


@dataclass(frozen=True)
class Planned:
    """A run of the grid: its configuration, what it is known by, and the name of its directory."""

    config: TrainConfig
    identity: str
    name: str


def load_grid(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> list[Planned]:
    """Read the file of a sweep; overrides go over every run."""
    return expand(read_toml(path), overrides, source=str(path))


def expand(
    table: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = (), *, source: str
) -> list[Planned]:
    """Every combination of the grids, in their order, each run once."""
    for key in table:
        if key not in ("run", "grid"):
            raise InputError(f"{source}: unknown table [{key}]; {suggestion(key, ('run', 'grid'))}")
    common = table.get("run", {})
    if not isinstance(common, Mapping):
        raise InputError(f"{source}: run = {common!r}: is a table, [run].")
    grids = _grids(table, source)
    if not common and not any(grids):
        raise InputError(
            f"{source}: asks for no run; say in [run] what all have in common, or in [grid] what "
            "they differ in, as seed = [0, 1]."
        )
    planned: dict[str, Planned] = {}
    for grid in grids:
        for values in _combinations(grid, source):
            config = _configured(common, values, overrides, source)
            identity = run_identity(config)
            planned.setdefault(identity, Planned(config, identity, name_of(config, identity)))
    return list(planned.values())


def name_of(config: TrainConfig, identity: str) -> str:
    """A directory's name: what the run is for people, and what makes it this one."""
    label = method_label({"name": config.method["name"], **make_method(config).full_settings()})
    words = f"{config.data}-{config.model}-{label}"
    short = re.sub(r"[^A-Za-z0-9.=]+", "-", words)[:_LONGEST_LABEL].rstrip("-.")
    sparsity = config.method.get("sparsity", 0)
    return f"{short}-{sparsity:g}-seed{config.seed}-{identity[:8]}"


def _grids(table: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    grids = table.get("grid", {})
    grids = grids if isinstance(grids, list) else [grids]
    if not all(isinstance(grid, Mapping) for grid in grids) or not grids:
        raise InputError(f"{source}: grid is a table of lists, [grid], or several, [[grid]].")
    return grids


def _combinations(grid: Mapping[str, Any], source: str) -> Iterator[dict[str, Any]]:
    axes = dict(_axes(grid))
    for key, values in axes.items():
        if not values:
            raise InputError(f"{source}: grid.{key} = []: lists no value; name one, or drop it.")
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _axes(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Dotted keys and their values; a single value is a list of one."""
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and not (dotted == "method" and "name" in value):
            yield from _axes(value, prefix=f"{dotted}.")
        else:
            yield dotted, value if isinstance(value, list) else [value]


def _configured(
    common: Mapping[str, Any],
    values: Mapping[str, Any],
    overrides: Sequence[tuple[str, Any]],
    source: str,
) -> TrainConfig:
    table = copy.deepcopy(dict(common))
    # The method first: it takes the place of what [run] says, other keys go on top of it.
    for key in sorted(values, key=lambda key: key != "method"):
        _put(table, key, copy.deepcopy(values[key]), source)
    for key, value in overrides:
        _put(table, key, value, "--set")
    method = table.get("method")
    if isinstance(method, dict) and method.get("name") == "dense":
        method.pop("sparsity", None)  # it has none, whatever the others are asked for
    table.setdefault("dense_twin", False)  # in a grid, dense training is a method
    over = frozenset("method.sparsity" if key == "sparsity" else key for key, _ in overrides)
    return complete_config(table, origins=Origins(source, over, has_flags=False))


def _put(table: dict[str, Any], key: str, value: Any, source: str) -> None:
    if key == "method":
        settings = {"name": value} if isinstance(value, str) else value
        if not isinstance(settings, Mapping) or "name" not in settings:
            raise InputError(
                f"{source}: grid.method = {value!r}: a name, or a table with one, as "
                f'{{ name = "probmask", scope = "layer" }}; the names: {", ".join(METHODS)}.'
            )
        before = table.get("method", {})
        sparsity = before.get("sparsity") if isinstance(before, Mapping) else None
        kept = {} if sparsity is None else {"sparsity": sparsity}
        table["method"] = {**kept, **settings}
    else:
        assign(table, "method.sparsity" if key == "sparsity" else key, value)
