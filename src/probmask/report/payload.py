"""The data of the page as JSON, small even for thousands of runs."""

import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from probmask.analysis.comparison import (
    Cell,
    Setting,
    compare,
    figure_in,
    flattened,
    in_probmask_family,
)
from probmask.analysis.records import Run
from probmask.version import __version__

# Limits for the whole page, which keep its size at a few megabytes.
_CURVE_POINTS = 60_000
_HISTOGRAMS = 4_000
_MAX_CURVES = 8
_NOT_CURVES = frozenset(("step", "epoch", "histograms"))
_DIGITS = 4


def make_payload(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the data that the page draws; it computes means and ranks itself."""
    settings = compare(runs)
    methods = _methods(settings)
    cells = sum(len(setting.cells) for setting in settings)
    curves = _curve_names(runs)
    points = max(8, min(100, _CURVE_POINTS // max(1, cells * len(curves))))
    snapshots = max(2, min(30, _HISTOGRAMS // max(1, cells)))
    ordered = [run for setting in settings for cell in setting.cells for run in cell.runs]
    names = _names([run.path for run in ordered])
    config, variants = _configurations(ordered)
    rows = iter(zip(names, variants, strict=True))
    return {
        "version": __version__,
        "methods": methods,
        "curves": curves,
        "settings": [
            _setting_table(setting, methods, curves, points, snapshots) for setting in settings
        ],
        "runs": [
            _run_row(run, *next(rows), setting=index, cell=position, timed=cell.timed is not None)
            for index, setting in enumerate(settings)
            for position, cell in enumerate(setting.cells)
            for run in cell.runs
        ],
        "config": config,
    }


def _methods(settings: Sequence[Setting]) -> list[str]:
    """Return all labels by mean rank, the ProbMask family first; colors follow this order."""
    ranks: dict[str, list[int]] = {}
    for setting in settings:
        for level in {cell.level for cell in setting.cells}:
            cells = [cell for cell in setting.cells if cell.level == level]
            for rank, cell in enumerate(sorted(cells, key=lambda cell: (-cell.mean, cell.label))):
                ranks.setdefault(cell.label, []).append(rank)
    return sorted(
        ranks,
        key=lambda label: (
            label == "dense",
            not in_probmask_family(label),
            statistics.fmean(ranks[label]),
            label,
        ),
    )


def _setting_table(
    setting: Setting, methods: Sequence[str], curves: Sequence[str], points: int, snapshots: int
) -> dict[str, Any]:
    layers = _layers(setting)
    return {
        "title": setting.title,
        "details": list(setting.details),
        "layers": list(layers),
        "sizes": list(layers.values()),
        "cells": [
            {
                "method": methods.index(cell.label),
                "sparsity": cell.sparsity,
                "cost": cell.cost,
                "n": len(cell.runs),
                "verified": cell.verified,
                "reached": round(cell.reached, 6),
                "paper": cell.paper,
                "size": cell.runs[0].record["size"],
                "dense_macs": cell.runs[0].record["macs"]["dense"],
                "batch": None if cell.timed is None else cell.timed[0],
                "layers": _kept_of(cell, layers),
                "curves": _curves(cell, curves, points),
                "histograms": _histograms(cell, snapshots),
            }
            for cell in setting.cells
        ],
    }


def _run_row(
    run: Run, name: str, variant: int, *, setting: int, cell: int, timed: bool
) -> list[Any]:
    """Return the values of a run, in the order of RUN_FIELDS in page.js."""
    record = run.record
    return [
        name,
        setting,
        cell,
        run.seed,
        run.accuracy,
        run.validation_accuracy,
        record["kept"],
        record["macs"]["sparse"],
        record["bytes"],
        round(record["seconds"], 1),
        figure_in(record, "latency", "milliseconds") if timed else None,
        variant,
    ]


def _layers(setting: Setting) -> dict[str, int]:
    """Return the number of weights of each layer, from the input to the output."""
    layers: dict[str, int] = {}
    for cell in setting.cells:
        for layer in cell.runs[0].record["layers"]:
            layers.setdefault(layer["name"], layer["size"])
    return layers


def _kept_of(cell: Cell, layers: Mapping[str, int]) -> list[float]:
    """Return the mean number of weights kept in each layer, or [] if the layers differ."""
    kept: dict[str, list[float]] = {}
    for run in cell.runs:
        for layer in run.record["layers"]:
            kept.setdefault(layer["name"], []).append(layer["kept"])
    if any(len(kept.get(name, ())) != len(cell.runs) for name in layers):
        return []
    return [round(statistics.fmean(kept[name]), 1) for name in layers]


def _curve_names(runs: Iterable[Run]) -> list[str]:
    """Return the metrics that most histories contain."""
    found: Counter[str] = Counter()
    for run in runs:
        for line in run.history[-1:]:
            found.update(
                name
                for name in line
                if name not in _NOT_CURVES and figure_in(line, name) is not None
            )
    return [name for name, _ in found.most_common(_MAX_CURVES)]


def _curves(cell: Cell, names: Sequence[str], points: int) -> dict[str, Any] | None:
    """Return means over seeds for at most `points` epochs, including the last."""
    lines: dict[float, list[Mapping[str, Any]]] = {}
    for run in cell.runs:
        for line in run.history:
            if "epoch" in line:
                lines.setdefault(line["epoch"], []).append(line)
    complete = sorted(epoch for epoch, found in lines.items() if len(found) == len(cell.runs))
    epochs = _thinned(complete, points)
    values = {
        name: [_mean(figure_in(line, name) for line in lines[epoch]) for epoch in epochs]
        for name in names
    }
    present = {
        name: column for name, column in values.items() if any(v is not None for v in column)
    }
    return {"epochs": epochs, "values": present} if present else None


def _histograms(cell: Cell, snapshots: int) -> dict[str, Any] | None:
    """Return the histograms of the cell's first run over its epochs, by name."""
    run = cell.runs[0]
    found: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for line in run.history:
        for name, shape in line.get("histograms", {}).items():
            if "epoch" in line and shape["low"] < shape["high"] and shape["counts"]:
                found.setdefault(name, []).append((line["epoch"], shape))
    return {
        name: _over_epochs(_same_bins(shapes), run.seed, snapshots)
        for name, shapes in found.items()
    } or None


def _over_epochs(
    shapes: Sequence[tuple[float, Mapping[str, Any]]], seed: int, snapshots: int
) -> dict[str, Any]:
    chosen = _thinned(shapes, snapshots)
    return {
        "low": chosen[-1][1]["low"],
        "high": chosen[-1][1]["high"],
        "seed": seed,
        "epochs": [epoch for epoch, _ in chosen],
        "counts": [shape["counts"] for _, shape in chosen],
    }


def _same_bins(
    shapes: Sequence[tuple[float, Mapping[str, Any]]],
) -> list[tuple[float, Mapping[str, Any]]]:
    """Return the histograms with the same bins as the last one; only these are comparable."""
    last = shapes[-1][1]
    bins = (last["low"], last["high"], len(last["counts"]))
    return [
        (epoch, shape)
        for epoch, shape in shapes
        if (shape["low"], shape["high"], len(shape["counts"])) == bins
    ]


def _thinned(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` evenly spaced values, including the first and the last."""
    if len(values) <= most:
        return list(values)
    indices = {round(i * (len(values) - 1) / (most - 1)) for i in range(most)}
    return [values[index] for index in sorted(indices)]


def _mean(figures: Iterable[float | None]) -> float | None:
    present = [figure for figure in figures if figure is not None]
    return float(f"{statistics.fmean(present):.{_DIGITS}g}") if present else None


def _names(paths: Sequence[Path]) -> list[str]:
    """Name the runs by their paths relative to their deepest common directory."""
    locations = [
        path.absolute().parent if path.name == "record.json" else path.absolute().with_suffix("")
        for path in paths
    ]
    common = Path(os.path.commonpath(locations))
    root = common.parent if common in locations else common
    return [location.relative_to(root).as_posix() for location in locations]


def _configurations(runs: Sequence[Run]) -> tuple[dict[str, Any], list[int]]:
    """Return the settings of all runs as differences from the most common ones.

    Runs that differ only in their seeds share one entry. Keys and values are numbered; -1 means
    that a run does not have the setting.

    Returns:
        The tables of keys, values and variants, and for each run the index of its variant.
    """
    tables = [_settings(run) for run in runs]
    keys = sorted({key for table in tables for key in table})
    common = [_most_common(table.get(key) for table in tables) for key in keys]
    values: dict[str, int] = {}

    def number(value: str | None) -> int:
        return -1 if value is None else values.setdefault(value, len(values))

    base = [number(value) for value in common]
    variants: dict[tuple[int, ...], int] = {}
    chosen = []
    for table in tables:
        pairs = [
            (index, number(table.get(key)))
            for index, key in enumerate(keys)
            if table.get(key) != common[index]
        ]
        flat = tuple(n for pair in pairs for n in pair)
        chosen.append(variants.setdefault(flat, len(variants)))
    described = {
        "keys": keys,
        "values": list(values),
        "base": base,
        "variants": [list(variant) for variant in variants],
    }
    return described, chosen


def _settings(run: Run) -> dict[str, str]:
    """Return the configuration, versions and hardware of a run as flat text."""
    config = {key: value for key, value in run.config.items() if key not in ("seed", "method")}
    for key in ("data_dir", "init"):  # the page may be published, so it shows no paths
        if key in config:
            config[key] = Path(str(config[key])).name
    settings = config.get("data_args")
    if isinstance(settings, Mapping) and "tokenizer" in settings:
        name = Path(str(settings["tokenizer"])).name
        config["data_args"] = {**settings, "tokenizer": name}
    others = {key: run.record.get(key) for key in ("versions", "hardware")}
    return flattened({**config, "method": run.record["method"], **others})


def _most_common(values: Iterable[str | None]) -> str | None:
    return Counter(values).most_common(1)[0][0]
