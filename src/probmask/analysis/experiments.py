"""Experiments: a TOML file for each table and figure of the paper, and for our own comparisons.

title, about, shows   title, conclusion, and the part of the report that shows it
[laptop], [paper]     the runs of each scale: [….run] and [….grid] as in the file of a sweep, the
                      ``minutes`` per run, and the hardware (``on``) on which they were measured
[curve]               parameters of a figure that is computed without training
[[paper_results]]     accuracies that the paper reports, shown next to ours
"""

import csv
import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from probmask.analysis.records import Run
from probmask.checks import Range
from probmask.errors import InputError
from probmask.messages import lookup
from probmask.parsing import read_toml
from probmask.schema import mismatch

SCALES = ("laptop", "paper")
# In an installed package the files are inside it, in a checkout next to the source.
_ROOT = Path(__file__).parents[3]
_DIRECTORIES = (Path(__file__).parents[1] / "experiments", _ROOT / "experiments")
# In the order of the paper, followed by our own.
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
    "paper_claims",
    "short_budget",
    "short_budget_adamw",
    "long_budget",
    "training_length",
    "leaderboard",
    "leaderboard_resnet20",
    "ham",
    "registry",
    "pretrained_resnet20",
    "sst2_minilm_tuning",
    "sst2_minilm",
    "vit_adamw",
)
_FEWER_IMAGES = ("train_images", "test_images")


class _Scale(TypedDict):
    on: str
    minutes: Annotated[float, Range(0, meaning="a number")]
    run: dict[str, Any]
    grid: Any


class _Curve(TypedDict):
    prob: list[float]
    noise: float
    temperature: list[float]
    points: Annotated[int, Range(2, 10_000, "a number of points")]


class _PaperResult(TypedDict):
    data: str
    model: str
    method: str
    settings: NotRequired[dict[str, Any]]
    accuracy: dict[str, float]


class _Table(TypedDict):
    title: str
    about: str
    shows: str
    laptop: NotRequired[_Scale]
    paper: NotRequired[_Scale]
    curve: NotRequired[_Curve]
    paper_results: NotRequired[list[_PaperResult]]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or a comparison of our own."""

    name: str
    title: str
    about: str
    shows: str
    scales: Mapping[str, Mapping[str, Any]]
    curve: Mapping[str, Any] | None
    paper_results: tuple[Mapping[str, Any], ...]

    def sweep(self, scale: str) -> dict[str, Any]:
        """Return the [run] and [grid] tables of a scale, from which a sweep is expanded."""
        table = lookup("scale", "--scale", scale, self.scales)
        return {key: table[key] for key in ("run", "grid")}

    def minutes(self, scale: str) -> float:
        """Return the approximate minutes per run."""
        return float(self.scales[scale]["minutes"])

    def hardware(self, scale: str) -> str:
        """Return the hardware for which `minutes` holds."""
        return str(self.scales[scale]["on"])


@functools.cache
def experiments() -> dict[str, Experiment]:
    """Return all experiments by name, those of the paper first."""
    directory = next((path for path in _DIRECTORIES if (path / "table1.toml").exists()), None)
    if directory is None:
        raise InputError(
            f"the files of the experiments (table1.toml, …) are missing from {_DIRECTORIES[0]}; "
            "reinstall probmask."
        )
    return {name: load_experiment(directory / f"{name}.toml") for name in _ORDER}


def find_experiment(name: str) -> Experiment:
    """Return the experiment with this name."""
    return lookup("experiment", "reproduce", name, experiments())


def paper_figure(run: Run) -> float | None:
    """Return the accuracy in percent that the paper reports for such a run, or None.

    A row of the paper matches if it has the same data, network, method, sparsity and, where rows
    differ in them, settings of the method. The training need not be the same.
    """
    settings = run.settings
    if settings["model_args"] or any(key in settings["data_args"] for key in _FEWER_IMAGES):
        return None
    for row in _paper_rows():
        named = (row["data"], row["model"], row["method"]) == (run.data, run.model, run.method)
        required = row.get("settings", {})
        if named and all(run.record["method"].get(key) == required[key] for key in required):
            for sparsity, accuracy in row["accuracy"].items():
                if abs(float(sparsity) - run.sparsity) < 1e-9:
                    return float(accuracy)
    return None


def slope_curve(settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return S = σ(r/τ)(1 - σ(r/τ)) / (τ s (1 - s)), r = ln(s / (1 - s)) + g, for each s and τ.

    Args:
        settings: The experiment's [curve]: ``prob`` lists the values of s, ``noise`` is g, and
            ``temperature`` the first and the last of ``points`` values of τ.
    """
    import torch  # here, since commands that read records must not import it

    from probmask.core.relaxation import relaxed_slope

    start, end = settings["temperature"]
    temperatures = torch.linspace(start, end, settings["points"], dtype=torch.float64)
    noise = torch.tensor(settings["noise"], dtype=torch.float64)
    return [
        {
            "prob": prob,
            "temperature": round(float(temperature), 6),
            "slope": float(
                relaxed_slope(torch.tensor(prob, dtype=torch.float64), noise, temperature)
            ),
        }
        for prob in settings["prob"]
        for temperature in temperatures
    ]


def curve_csv(rows: list[dict[str, float]]) -> str:
    """Return the points of a curve as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@functools.cache
def _paper_rows() -> tuple[Mapping[str, Any], ...]:
    return tuple(row for each in experiments().values() for row in each.paper_results)


def load_experiment(path: Path) -> Experiment:
    """Return the experiment that a TOML file describes.

    Raises:
        InputError: The file cannot be read, or a key is missing or has the wrong type.
    """
    table = read_toml(path)
    wrong = mismatch(table, _Table)
    if wrong is not None:
        raise InputError(f"{path}: {wrong}.")
    return Experiment(
        name=path.stem,
        title=table["title"],
        about=table["about"],
        shows=table["shows"],
        scales={scale: table[scale] for scale in SCALES if scale in table},
        curve=table.get("curve"),
        paper_results=tuple(table.get("paper_results", ())),
    )
