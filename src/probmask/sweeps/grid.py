"""The grid of a sweep: one configuration per combination of the values that it lists.

[run]     settings of all runs, as in the file of a single run
[grid]    lists of values for methods, sparsities, seeds or any other key; [[grid]] for several
"""

import copy
import itertools
import math
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

_MAX_LABEL = 60  # characters
_MAX_RUNS = 10_000  # of one file; a thousand take seconds to expand


@dataclass(frozen=True)
class PlannedRun:
    """A run of the grid: its configuration, its identity, and the name of its directory."""

    config: TrainConfig
    identity: str
    name: str


def load_grid(path: Path, overrides: Sequence[tuple[str, Any]] = ()) -> list[PlannedRun]:
    """Read the file of a sweep and return its runs.

    Args:
        path: TOML file with the tables ``[run]`` and ``[grid]``.
        overrides: Pairs of a dotted key and a value, which apply to every run.

    Returns:
        One run per combination of values; equal runs are listed once.

    Raises:
        InputError: The file cannot be read, or a run has a wrong setting.
    """
    return expand(read_toml(path), overrides, source=str(path))


def expand(
    table: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = (), *, source: str
) -> list[PlannedRun]:
    """Return the runs of a sweep, as `load_grid` does, from a table.

    ``source`` names the origin of the table in errors.

    Example:
        >>> from probmask.sweeps.grid import expand
        >>> runs = expand({"grid": {"sparsity": [0.9, 0.98], "seed": [0, 1]}}, source="example")
        >>> [(run.config.method["sparsity"], run.config.seed) for run in runs]
        [(0.9, 0), (0.9, 1), (0.98, 0), (0.98, 1)]
    """
    for key in table:
        if key not in ("run", "grid"):
            raise InputError(f"{source}: unknown table [{key}]; {suggestion(key, ('run', 'grid'))}")
    common = table.get("run", {})
    if not isinstance(common, Mapping):
        raise InputError(f"{source}: run = {common!r}: must be a table, [run].")
    grids = _grids(table, source)
    if not common and not any(grids):
        raise InputError(
            f"{source}: describes no run; put common settings in [run], or lists of values in "
            "[grid], such as seed = [0, 1]."
        )
    axes = [_axes_of(grid, source) for grid in grids]
    total = sum(math.prod(len(values) for values in each.values()) for each in axes)
    if total > _MAX_RUNS:
        raise InputError(
            f"{source}: the grid has {total:,} runs, but at most {_MAX_RUNS:,} are allowed; list "
            "fewer values, or split it into several files."
        )
    planned: dict[str, PlannedRun] = {}
    for each in axes:
        for values in _combinations(each):
            config = _make_config(common, values, overrides, source)
            identity = run_identity(config)
            planned.setdefault(identity, PlannedRun(config, identity, _run_name(config, identity)))
    return list(planned.values())


def _run_name(config: TrainConfig, identity: str) -> str:
    """Return the name of a run's directory: a readable label and the start of its identity."""
    label = method_label({"name": config.method["name"], **make_method(config).full_settings()})
    words = f"{config.data}-{config.model}-{label}"
    short = re.sub(r"[^A-Za-z0-9.=]+", "-", words)[:_MAX_LABEL].rstrip("-.")
    sparsity = config.method.get("sparsity", 0)
    return f"{short}-{sparsity:g}-seed{config.seed}-{identity[:8]}"


def _grids(table: Mapping[str, Any], source: str) -> list[Mapping[str, Any]]:
    grids = table.get("grid", {})
    grids = grids if isinstance(grids, list) else [grids]
    if not all(isinstance(grid, Mapping) for grid in grids) or not grids:
        raise InputError(f"{source}: grid must be a table of lists, [grid], or several, [[grid]].")
    return grids


def _axes_of(grid: Mapping[str, Any], source: str) -> dict[str, list[Any]]:
    axes = dict(_axes(grid))
    for key, values in axes.items():
        if not values:
            raise InputError(f"{source}: grid.{key} = []: lists no value; add one, or remove it.")
    return axes


def _combinations(axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _axes(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield dotted keys and their lists of values; a single value becomes a list of one."""
    for key, value in table.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and not (dotted == "method" and "name" in value):
            yield from _axes(value, prefix=f"{dotted}.")
        else:
            yield dotted, value if isinstance(value, list) else [value]


def _make_config(
    common: Mapping[str, Any],
    values: Mapping[str, Any],
    overrides: Sequence[tuple[str, Any]],
    source: str,
) -> TrainConfig:
    table = copy.deepcopy(dict(common))
    # The method first, because it replaces the method of [run]; other keys then override it.
    for key in sorted(values, key=lambda key: key != "method"):
        _set_key(table, key, copy.deepcopy(values[key]), source)
    for key, value in overrides:
        _set_key(table, key, value, "--set")
    method = table.get("method")
    if isinstance(method, dict) and method.get("name") == "dense":
        method.pop("sparsity", None)  # the dense method has none
    table.setdefault("dense_twin", False)  # in a grid, dense training is one of the methods
    written = {
        "method.sparsity" if key == "sparsity" else key: f"--set {key}={value}"
        for key, value in overrides
    }
    origins = Origins(source, frozenset(written), has_flags=False, written=written)
    return complete_config(table, origins=origins)


def _set_key(table: dict[str, Any], key: str, value: Any, source: str) -> None:
    if key == "method":
        settings = {"name": value} if isinstance(value, str) else value
        if not isinstance(settings, Mapping) or "name" not in settings:
            raise InputError(
                f"{source}: grid.method = {value!r}: expected a name, or a table with a name, such "
                f'as {{ name = "probmask", scope = "layer" }}; choose from {", ".join(METHODS)}.'
            )
        previous = table.get("method", {})
        sparsity = previous.get("sparsity") if isinstance(previous, Mapping) else None
        inherited = {} if sparsity is None else {"sparsity": sparsity}
        table["method"] = {**inherited, **settings}
    else:
        assign(table, "method.sparsity" if key == "sparsity" else key, value)
