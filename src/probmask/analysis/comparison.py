"""Which runs may be compared with which, and what comes out: means over seeds, and the best."""

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

# The images that an accuracy is of: those of the test, or the training images held out.
Part = Literal["test", "val"]
# What is not a condition of the comparison, but what is compared.
_COMPARED = ("seed", "method")
# Of a setting's title, or told in its own words.
_TITLE = ("data", "model", "epochs", "batch_size")


@dataclass(frozen=True)
class Cell:
    """Runs of one method at one sparsity, which differ in their seeds only."""

    runs: Sequence[Run]
    on: Part

    @property
    def label(self) -> str:
        """The method and its unusual settings."""
        return self.runs[0].label

    @property
    def sparsity(self) -> float:
        """The sparsity that was asked for."""
        return self.runs[0].sparsity

    @property
    def cost(self) -> str:
        """What the sparsity is a fraction of: weights ("params") or multiply-accumulates."""
        return "flops" if self.runs[0].record["method"].get("cost") == "flops" else "params"

    @property
    def level(self) -> tuple[float, str]:
        """What two cells must have in common for one to be called better."""
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
        """The standard deviation of the sample; None of a single run."""
        if len(self.runs) < 2:
            return None
        return statistics.stdev(self.accuracies)

    @cached_property
    def paper(self) -> float | None:
        """What the paper reports for such runs, in percent; its training may be another.

        The paper's figures are of test images: beside validation figures there is none.
        """
        return paper_figure(self.runs[0]) if self.on == "test" else None

    @cached_property
    def verified(self) -> bool:
        """Whether every run holds what it was asked for, counted layer by layer."""
        return all(_holds_its_sparsity(run.record) for run in self.runs)

    @property
    def reached(self) -> float:
        """The mean of the sparsities that came out."""
        return statistics.fmean(run.reached for run in self.runs)

    @cached_property
    def timed(self) -> tuple[float, float] | None:
        """Batch size and threads that the runs were timed with, if some were, and all alike."""
        found = set()
        for run in self.runs:
            if figure_in(run.record, "latency", "milliseconds") is not None:
                batch = figure_in(run.record, "latency", "batch")
                threads = figure_in(run.record, "latency", "threads")
                found.add((1 if batch is None else batch, 1 if threads is None else threads))
        return found.pop() if len(found) == 1 else None

    @property
    def milliseconds(self) -> float | None:
        """The mean time of a forward pass; None if a run was not timed, or not as the others."""
        return None if self.timed is None else self.mean_of("latency", "milliseconds")

    def mean_of(self, *keys: str) -> float | None:
        """The mean of a figure of the records; None if one of them lacks it."""
        figures = [figure_in(run.record, *keys) for run in self.runs]
        present = [figure for figure in figures if figure is not None]
        return statistics.fmean(present) if present and len(present) == len(figures) else None


@dataclass(frozen=True)
class Setting:
    """Runs that may be compared: the same network, data and training, whatever the method."""

    title: str
    details: Sequence[str]
    on: Part
    cells: Sequence[Cell]

    @cached_property
    def best(self) -> frozenset[int]:
        """The places of the cells with the highest mean at their sparsity, where there is a choice.

        A run that missed the sparsity it was asked for does not compete.
        """
        found: set[int] = set()
        for level in {cell.level for cell in self.cells}:
            rivals = [
                place
                for place, cell in enumerate(self.cells)
                if cell.level == level and cell.verified
            ]
            top = max((self.cells[place].mean for place in rivals), default=0.0)
            if len(rivals) > 1:
                found.update(place for place in rivals if self.cells[place].mean == top)
        return frozenset(found)

    @cached_property
    def ranking(self) -> list[str]:
        """The methods, best first, at the sparsity that most of them have, or else the highest.

        Those that were not trained to that sparsity come last, in the order of their cells.
        """
        counts = Counter(cell.level for cell in self.cells)
        common = max(counts, key=lambda level: (counts[level], level))
        judged = [cell for cell in self.cells if cell.level == common]
        judged.sort(key=lambda cell: (not cell.verified, -cell.mean))
        return list(dict.fromkeys(cell.label for cell in (*judged, *self.cells)))


def compare(runs: Iterable[Run], on: Part = "test") -> list[Setting]:
    """Sort runs into settings, and within them into cells; in an order that is always the same.

    They are compared by their accuracy on the images of that part; one without it is refused.
    The epochs that count are those that were trained, in all phases: a method that trains for
    longer than others, as one that rewinds several times does, has a table of its own.
    """
    settings: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        if not 0 <= run.sparsity < 1:
            raise InputError(
                f"{run.path}: sparsity.asked = {run.sparsity:g} is not a fraction removed, "
                "in [0, 1); the record is damaged."
            )
        _accuracy(run, on)  # refuses before anything is printed
        cells = settings.setdefault(json.dumps(_conditions(run), sort_keys=True), {})
        cells.setdefault(run.series, []).append(run)
    found = [_setting(list(cells.values()), on) for cells in settings.values()]
    return sorted(found, key=lambda setting: (setting.title, *setting.details))


def figure_in(record: Mapping[str, Any], *keys: str) -> float | None:
    """A number in a record, by its keys from the outermost in; None if it is not there."""
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if is_number(value) else None


def rounded(value: float, digits: int = 2) -> str:
    """A figure as text, by the digits it is printed with, halves away from zero; as browsers do."""
    return str(Decimal(repr(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def _accuracy(run: Run, on: Part) -> float:
    if on == "test":
        return run.accuracy
    if run.validation_accuracy is None:
        raise InputError(
            f"{run.path}: has no validation accuracy, which --on {on} compares by; only runs with "
            'select_on = "val" have one: train it so, leave it out, or compare with --on test.'
        )
    return run.validation_accuracy


def _conditions(run: Run) -> dict[str, Any]:
    shared = {key: value for key, value in run.deciding.items() if key not in _COMPARED}
    return {
        **shared,
        "epochs": run.record.get("epochs"),
        "batch_size": run.config.get("batch_size"),
    }


def _setting(cells: Sequence[Sequence[Run]], on: Part) -> Setting:
    first = cells[0][0]
    return Setting(
        f"{first.model} on {first.data}",
        _details(first),
        on,
        sorted(
            (Cell(sorted(runs, key=lambda run: run.seed), on) for runs in cells),
            key=lambda cell: (cell.level, cell.label != "probmask", cell.label),
        ),
    )


def _details(run: Run) -> list[str]:
    """How the runs of a setting were trained, in words."""
    conditions = _conditions(run)
    epochs, images = conditions["epochs"], run.record.get("train_images")
    details = [f"{epochs} epochs" if epochs != 1 else "1 epoch"]
    if is_number(images):
        details.append(f"{images:,} training images")
    details.append(f"batches of {conditions['batch_size']}")
    unusual = {key: value for key, value in conditions.items() if key not in _TITLE}
    details += [
        f"{key.removeprefix('model_args.').removeprefix('data_args.')} = {value}"
        for key, value in flattened(unusual).items()
        if key != "data_args.train_images"
    ]
    return details


def flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted keys, with their values as text."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat.update(flattened(value, f"{prefix}{key}."))
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            flat[f"{prefix}{key}"] = shown
    return flat


def _holds_its_sparsity(record: Mapping[str, Any]) -> bool:
    """Whether the layers together keep what the asked sparsity allows, to one weight."""
    asked, layers = float(record["sparsity"]["asked"]), record["layers"]
    in_macs = record["method"].get("cost") == "flops"
    spent = whole = dearest = 0.0
    for layer in layers:
        kept, size = figure_in(layer, "kept"), figure_in(layer, "size")
        price = figure_in(layer, "macs_per_weight") if in_macs else 1
        if kept is None or size is None or price is None:
            return False
        spent, whole, dearest = spent + price * kept, whole + price * size, max(dearest, price)
    return whole > 0 and abs(spent - (1 - asked) * whole) <= dearest
