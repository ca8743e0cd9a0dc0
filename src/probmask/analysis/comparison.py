"""Group runs that are comparable, and compute means over seeds and the best method."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import cached_property
from typing import Any, Literal

from probmask.analysis.experiments import paper_figure
from probmask.analysis.records import Run
from probmask.checks import is_number
from probmask.errors import InputError

# The images on which an accuracy is measured: test images, or held-out training images.
Part = Literal["test", "val"]
# What the columns of a table are; within a column, methods are ranked.
Columns = Literal["sparsity", "updates"]
# Settings that are compared; all others must agree.
_COMPARED = ("seed", "method")
# Settings that the title or the first details of a table show.
_TITLE = ("data", "model", "epochs", "batch_size")


@dataclass(frozen=True)
class Cell:
    """Runs of one method at one sparsity, which differ only in their seeds."""

    runs: Sequence[Run]
    on: Part
    columns: Columns

    @property
    def label(self) -> str:
        """The method and its non-default settings."""
        return self.runs[0].label

    @property
    def sparsity(self) -> float:
        """The target sparsity."""
        return self.runs[0].sparsity

    @property
    def updates(self) -> int:
        """The length of the training."""
        return int(self.runs[0].record["updates"])

    @property
    def cost(self) -> str:
        """The unit of the sparsity: weights ("params") or multiply-accumulates ("flops")."""
        return "flops" if self.runs[0].record["method"].get("cost") == "flops" else "params"

    @property
    def level(self) -> tuple[float, str]:
        """The column: sparsity or number of updates, and the unit of the sparsity."""
        if self.columns == "updates":
            return float(self.updates), self.cost
        return self.sparsity, self.cost

    @property
    def accuracies(self) -> Sequence[float]:
        """The accuracy of each run after the last epoch, in percent."""
        return [_accuracy(run, self.on) for run in self.runs]

    @cached_property
    def mean(self) -> float:
        """The mean accuracy over the seeds, in percent."""
        return statistics.fmean(self.accuracies)

    @cached_property
    def deviation(self) -> float | None:
        """The sample standard deviation; None for a single run."""
        if len(self.runs) < 2:
            return None
        return statistics.stdev(self.accuracies)

    @cached_property
    def paper(self) -> float | None:
        """The accuracy that the paper reports for such runs, in percent; None on validation.

        The paper measures on test images, and its training may differ.
        """
        return paper_figure(self.runs[0]) if self.on == "test" else None

    @cached_property
    def verified(self) -> bool:
        """Whether every run reached its target sparsity, counted layer by layer."""
        return all(_reached_target(run.record) for run in self.runs)

    @property
    def reached(self) -> float:
        """The mean of the sparsities reached."""
        return statistics.fmean(run.reached for run in self.runs)

    @cached_property
    def timed(self) -> tuple[float, float] | None:
        """Batch size and threads of the timings; None without timings, or if they differ."""
        found = set()
        for run in self.runs:
            if figure_in(run.record, "latency", "milliseconds") is not None:
                batch = figure_in(run.record, "latency", "batch")
                threads = figure_in(run.record, "latency", "threads")
                found.add((1 if batch is None else batch, 1 if threads is None else threads))
        return found.pop() if len(found) == 1 else None

    @property
    def milliseconds(self) -> float | None:
        """The mean time of a forward pass; None if a run lacks it or timings differ."""
        return None if self.timed is None else self.mean_of("latency", "milliseconds")

    def mean_of(self, *keys: str) -> float | None:
        """Return the mean of a figure of the records, or None if a record lacks it."""
        figures = [figure_in(run.record, *keys) for run in self.runs]
        present = [figure for figure in figures if figure is not None]
        return statistics.fmean(present) if present and len(present) == len(figures) else None


@dataclass(frozen=True)
class Setting:
    """Comparable runs: the same network, data and training, with any method."""

    title: str
    details: Sequence[str]
    on: Part
    columns: Columns
    cells: Sequence[Cell]

    @cached_property
    def best(self) -> frozenset[int]:
        """Indices of the cells with the highest mean at their level, if it has several cells.

        Runs that missed their target sparsity are not ranked, nor are dense ones among sparse ones.
        """
        found: set[int] = set()
        all_dense = all(cell.sparsity == 0 for cell in self.cells)
        for level in {cell.level for cell in self.cells}:
            ranked = [
                index
                for index, cell in enumerate(self.cells)
                if cell.level == level and cell.verified and (cell.sparsity > 0 or all_dense)
            ]
            top = max((self.cells[index].mean for index in ranked), default=0.0)
            if len(ranked) > 1:
                found.update(index for index in ranked if self.cells[index].mean == top)
        return frozenset(found)

    @cached_property
    def ranking(self) -> list[str]:
        """The methods, best first, at the level that most of them have, or the highest of these.

        Methods without a run at that level come last, in the order of their cells.
        """
        counts = Counter(cell.level for cell in self.cells)
        common = max(counts, key=lambda level: (counts[level], level))
        ranked = [cell for cell in self.cells if cell.level == common]
        ranked.sort(key=lambda cell: (not cell.verified, -cell.mean))
        return list(dict.fromkeys(cell.label for cell in (*ranked, *self.cells)))


def compare(
    runs: Iterable[Run], on: Part = "test", *, columns: Columns = "sparsity"
) -> list[Setting]:
    """Group runs into settings and cells, in a deterministic order.

    The number of epochs is that of all phases together, so a method that trains for longer, such
    as one that rewinds several times, gets a table of its own.

    Args:
        runs: Finished runs.
        on: The images on which accuracy is compared.
        columns: With ``"updates"``, runs of different lengths share a setting, and each sparsity
            has its own, which the dense runs are part of too.

    Raises:
        InputError: If a run has no accuracy on these images.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        _accuracy(run, on)  # raises before anything is printed
        key = json.dumps(_conditions(run, columns), sort_keys=True)
        groups.setdefault(key, []).append(run)
    tables = [table for group in groups.values() for table in _tables(group, columns)]
    found = [_setting(table, on, columns) for table in tables]
    return sorted(found, key=lambda setting: (setting.title, *setting.details))


def figure_in(record: Mapping[str, Any], *keys: str) -> float | None:
    """Return the number under nested keys, or None if there is none.

    For what a record may lack, and for metrics, which may hold anything.
    """
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if is_number(value) else None


def rounded(value: float, digits: int = 2) -> str:
    """Round a figure to text, halves away from zero, as the page does in a browser."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def in_probmask_family(label: str) -> bool:
    """Return whether a label is a member of the ProbMask family at its defaults."""
    return label in ("probmask", "probmask-tied")


def _accuracy(run: Run, on: Part) -> float:
    if on == "test":
        return run.accuracy
    if run.validation_accuracy is None:
        raise InputError(
            f"{run.path}: --on {on} needs a validation accuracy, and this run has none; train it "
            'with select_on = "val", omit it, or compare with --on test.'
        )
    return run.validation_accuracy


def _conditions(run: Run, columns: Columns) -> dict[str, Any]:
    """Return the settings in which comparable runs agree."""
    shared = {key: value for key, value in run.settings.items() if key not in _COMPARED}
    shared |= {"epochs": run.record["epochs"], "batch_size": run.config.get("batch_size")}
    if columns == "updates":
        del shared["epochs"]
    return shared


def _tables(runs: Sequence[Run], columns: Columns) -> list[Sequence[Run]]:
    """Divide comparable runs into tables."""
    if columns == "sparsity":
        return [runs]
    levels = {run.sparsity for run in runs} - {0.0} or {0.0}
    return [[run for run in runs if run.sparsity in (0.0, level)] for level in sorted(levels)]


def _setting(runs: Sequence[Run], on: Part, columns: Columns) -> Setting:
    cells: dict[str, list[Run]] = {}
    for run in runs:
        cells.setdefault(run.series, []).append(run)
    details = _details(runs[0], columns)
    if columns == "updates":
        level = max(run.sparsity for run in runs)
        details.insert(0, f"{100 * level:.4g} % sparsity" if level else "dense")
    return Setting(
        f"{runs[0].model} on {runs[0].data}",
        details,
        on,
        columns,
        sorted(
            (Cell(sorted(each, key=lambda run: run.seed), on, columns) for each in cells.values()),
            key=lambda cell: (cell.level, not in_probmask_family(cell.label), cell.label),
        ),
    )


def _details(run: Run, columns: Columns) -> list[str]:
    """Describe how the runs of a setting were trained."""
    conditions = _conditions(run, columns)
    details = []
    if columns == "sparsity":
        epochs = conditions["epochs"]
        details.append(f"{epochs} epochs" if epochs != 1 else "1 epoch")
    images = run.record.get("train_images")
    if images is not None:
        details.append(f"{images:,} training {run.record.get('examples', 'images')}")
    details.append(f"batches of {conditions['batch_size']}")
    other = {key: value for key, value in conditions.items() if key not in _TITLE}
    details += [
        f"{key.removeprefix('model_args.').removeprefix('data_args.')} = {_shown(key, value)}"
        for key, value in flattened(other).items()
        if key not in ("data_args.train_images", "data_args.train_sentences")
    ]
    return details


def _shown(key: str, value: str) -> str:
    """Return the value of a setting; a digest is shortened."""
    return f"{value[:12]}…" if key.endswith("sha256") else value


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings under dotted keys, with their values as text."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            flat[f"{prefix}{key}"] = shown
    return flat


def _reached_target(record: Mapping[str, Any]) -> bool:
    """Return whether the layers together keep what the target allows, within one weight."""
    target, layers = float(record["sparsity"]["asked"]), record["layers"]
    in_macs = record["method"].get("cost") == "flops"
    costs = [layer["macs_per_weight"] if in_macs else 1 for layer in layers]
    kept = sum(cost * layer["kept"] for cost, layer in zip(costs, layers, strict=True))
    total = sum(cost * layer["size"] for cost, layer in zip(costs, layers, strict=True))
    return bool(total > 0 and abs(kept - (1 - target) * total) <= max(costs))
