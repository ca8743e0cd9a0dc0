"""The experiments: a TOML file for each of the paper's tables and figures, and for our own.

title, about, shows   what it is, what it says, and where in the report to look
[laptop], [paper]     the runs of each scale: [….run] and [….grid] as in the file of a sweep, how
                      many ``minutes`` a run takes, and ``on`` what
[curve]               instead of runs: what a figure is computed from
[[paper_results]]     what the paper reports, to stand beside our own figures
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probmask.analysis.records import Run
from probmask.errors import InputError
from probmask.messages import lookup
from probmask.parsing import read_toml

SCALES = ("laptop", "paper")
# In an installed package the files lie within it, in a checkout beside its source.
_PLACES = (Path(__file__).parents[1] / "experiments", Path(__file__).parents[3] / "experiments")
# In the order of the paper; then what goes beyond it.
_ORDER = (
    "table1",
    "table2",
    "lsb_gsb",
    "mobilenetv1",
    "supermask",
    "accuracy_sparsity",
    "accuracy_flops",
    "layers",
    "mlprune_scores",
    "probabilities",
    "temperature",
    "short_budget",
    "leaderboard",
    "leaderboard_resnet20",
    "registry",
)
_FEWER_IMAGES = ("train_images", "test_images")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one beyond it."""

    name: str
    title: str
    about: str
    shows: str
    scales: Mapping[str, Mapping[str, Any]]
    curve: Mapping[str, Any] | None
    paper_results: tuple[Mapping[str, Any], ...]

    def sweep(self, scale: str) -> dict[str, Any]:
        """The runs of a scale, as a table that a sweep is made of."""
        table = lookup("scale", "--scale", scale, self.scales)
        return {key: table[key] for key in ("run", "grid")}

    def minutes(self, scale: str) -> float:
        """About how long a run takes."""
        return float(self.scales[scale]["minutes"])

    def hardware(self, scale: str) -> str:
        """On what it takes so long."""
        return str(self.scales[scale]["on"])


@functools.cache
def experiments() -> dict[str, Experiment]:
    """All experiments by name, those of the paper first, in its order."""
    directory = next((place for place in _PLACES if (place / "table1.toml").exists()), None)
    if directory is None:
        raise InputError(
            "the files of the experiments are not there (table1.toml and others, in "
            f"{_PLACES[0]}); install probmask anew."
        )
    return {name: _load(directory / f"{name}.toml") for name in _ORDER}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name."""
    return lookup("experiment", "reproduce", name, experiments())


def paper_figure(run: Run) -> float | None:
    """The accuracy that the paper reports for such a run, in percent; None if it has none.

    Such a run has the same data, network, method and sparsity, and those settings of the method
    that tell rows of the paper apart; its training may be another.
    """
    deciding = run.deciding
    if deciding["model_args"] or any(key in deciding["data_args"] for key in _FEWER_IMAGES):
        return None
    for row in _paper_rows():
        named = (row["data"], row["model"], row["method"]) == (run.data, run.model, run.method)
        settings = row.get("settings", {})
        if named and all(run.record["method"].get(key) == settings[key] for key in settings):
            for sparsity, accuracy in row["accuracy"].items():
                if abs(float(sparsity) - run.sparsity) < 1e-9:
                    return float(accuracy)
    return None


@functools.cache
def _paper_rows() -> tuple[Mapping[str, Any], ...]:
    return tuple(row for each in experiments().values() for row in each.paper_results)


def _load(path: Path) -> Experiment:
    table = read_toml(path)
    return Experiment(
        name=path.stem,
        title=table["title"],
        about=table["about"],
        shows=table["shows"],
        scales={scale: table[scale] for scale in SCALES if scale in table},
        curve=table.get("curve"),
        paper_results=tuple(table.get("paper_results", ())),
    )
