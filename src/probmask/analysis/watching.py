"""A run, or many, as `probmask watch` shows them: made to fit a terminal of any size."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from probmask.analysis.curves import Range, draw_axis, draw_curve
from probmask.checks import is_number
from probmask.training.run_directory import RunState

_LABEL = 6  # characters left of a curve
_HEAD = 2  # lines above the curves
_BESIDE = 40  # curves stand side by side if each gets so many characters
_TALLEST = 16  # rows that a curve is drawn in at most
_BAR = 10
# Of the table of runs, and how wide a terminal has to be to show them.
_HEADINGS = {
    "state": 0,
    "progress": 100,
    "epoch": 0,
    "loss": 0,
    "trained": 90,
    "sparsity": 80,
    "test": 0,
}
_ORDER = ("training", "stopped", "unreadable", "finished")


@dataclass(frozen=True)
class _Curve:
    """What of the log is drawn, and how it is written."""

    key: str
    title: str
    style: str
    factor: float
    write: Callable[[float], str]
    range: Callable[[Sequence[float]], Range]


_CURVES = (
    _Curve("loss", "loss", "cyan", 1, lambda value: f"{value:.4g}", lambda seen: _from_zero(seen)),
    _Curve(
        "train_accuracy",
        "training accuracy",
        "green",
        1,
        lambda value: f"{value:.2f} %",
        lambda seen: Range(min(90.0, 10 * math.floor(min(seen) / 10)), 100.0),
    ),
    _Curve(
        "expected_sparsity",
        "sparsity",
        "magenta",
        100,
        lambda value: f"{value:.2f} %",
        lambda seen: Range(0.0, 100.0),
    ),
)


def show_run(state: RunState, *, width: int, height: int, seconds_left: float | None) -> Group:
    """The curves of a run in at most so many lines, however few those are."""
    shown = state.at_work
    head = [Text(_title(state), style="bold"), Text(describe(state, seconds_left))]
    curves = [curve for curve in _CURVES if _values(shown.history, curve)]
    if not curves:
        return Group(*head, *([Text("no epoch is over yet", style="dim")] if _lives(state) else []))
    beside = len(curves) if width >= len(curves) * _BESIDE else 1
    rows = (height - _HEAD) // (len(curves) // beside) - 2
    size = {"width": width // beside - (beside > 1), "rows": min(_TALLEST, max(1, rows))}
    panels = [list(_panel(shown, curve, **size)) for curve in curves]
    if beside == 1:
        return Group(*head, *(line for panel in panels for line in panel))
    return Group(*head, *(Text(" ").join(lines) for lines in zip(*panels, strict=True)))


def describe(state: RunState, seconds_left: float | None = None) -> str:
    """Where a run is, in one line."""
    shown = state.at_work
    words: list[str] = [state.status]
    if shown is not state:
        words.append("its dense twin first")
    words.append(f"epoch {shown.epoch} of {shown.epochs}")
    if len(shown.phases) > 1 and _lives(state):
        name = shown.phases[shown.phase].name
        words.append(f"phase {shown.phase + 1} of {len(shown.phases)}: {name}")
    if seconds_left is not None and state.status == "training":
        words.append(f"{clock(seconds_left)} left")
    return " · ".join(words)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show_runs(
    root: Path,
    runs: Mapping[Path, RunState | str],
    *,
    width: int | None = None,
    height: int | None = None,
) -> Group:
    """A line for each run, those at work first; a run that cannot be read has its reason there.

    Without a size all lines are shown in full.
    """
    ordered = sorted(runs, key=lambda path: (_ORDER.index(_status(runs[path])), path))
    counts = {status: sum(_status(run) == status for run in runs.values()) for status in _ORDER}
    head = f"{root}: {len(runs)} runs, " + ", ".join(
        f"{count} {status}" for status, count in counts.items() if count
    )
    room = len(ordered) if height is None else max(1, height - 6)  # headings, rules, head and foot
    shown = [heading for heading in _HEADINGS if width is None or width >= _HEADINGS[heading]]
    rows = [_cells(runs[path]) for path in ordered[:room]]
    widths = [max(len(row[heading]) for row in [*rows, {heading: heading}]) for heading in shown]
    left = None if width is None else width - sum(widths) - 3 * len(widths) - 2
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("run", no_wrap=True)
    for heading in shown:
        words = heading in ("state", "progress")
        table.add_column(heading, no_wrap=True, justify="left" if words else "right")
    for path, row in zip(ordered, rows, strict=False):
        name = _shortened(str(path.relative_to(root)), left)
        table.add_row(Text(name), *(row[heading] for heading in shown))
    lines: list[Text | Table] = [Text(head, overflow="ellipsis", no_wrap=True), table]
    if room < len(ordered):
        lines.append(Text(f"… and {len(ordered) - room} more", style="dim"))
    lines += [
        Text(f"{path.relative_to(root)}: {reason}", overflow="ellipsis", no_wrap=height is not None)
        for path, reason in runs.items()
        if isinstance(reason, str) and height is None
    ]
    return Group(*lines)


def summarized(state: RunState) -> dict[str, Any]:
    """A run for machines, without its curves."""
    last = state.history[-1] if state.history else {}
    return {
        "directory": str(state.path),
        "status": state.status,
        "method": dict(state.config.method),
        "model": state.config.model,
        "data": state.config.data,
        "seed": state.config.seed,
        "epoch": state.epoch,
        "epochs": state.epochs,
        "phase": state.phases[state.phase].name,
        **{curve.key: last.get(curve.key) for curve in _CURVES},
        "test_accuracy": None if state.record is None else state.record["test"]["accuracy"],
    }


def in_full(state: RunState) -> dict[str, Any]:
    """A run for machines: its curves, its record once it is finished, and its twin."""
    history = [
        {key: value for key, value in line.items() if key != "histograms"} for line in state.history
    ]
    return {
        **summarized(state),
        "phases": [{"name": phase.name, "epochs": phase.epochs} for phase in state.phases],
        "history": history,
        "record": state.record,
        "dense": None if state.twin is None else in_full(state.twin),
    }


def _lives(state: RunState) -> bool:
    return state.status != "finished"


def _title(state: RunState) -> str:
    config = state.config
    sparsity = config.method.get("sparsity")
    asked = "" if sparsity is None else f" {100 * sparsity:g} %"
    return f"{config.method['name']}{asked} · {config.model} on {config.data} · seed {config.seed}"


def _values(history: Sequence[Mapping[str, Any]], curve: _Curve) -> list[tuple[float, float]]:
    return [
        (line["epoch"], curve.factor * line[curve.key])
        for line in history
        if isinstance(line.get(curve.key), int | float)
    ]


def _panel(state: RunState, curve: _Curve, *, width: int, rows: int) -> Iterator[Text]:
    """A curve with its name and present value above, and its axes."""
    points = _values(state.history, curve)
    finite = [value for _, value in points if math.isfinite(value)]
    up = curve.range(finite) if finite else Range(0, 1)
    across = Range(1, state.epochs)
    borders = [end + 0.5 for end in accumulate(phase.epochs for phase in state.phases)][:-1]
    yield _line(width, (f"{'':{_LABEL}}{curve.title} ", "bold"), (curve.write(points[-1][1]), ""))
    room = width - _LABEL
    drawn = draw_curve(points, width=room, height=rows, across=across, up=up, borders=borders)
    labels = [f"{up.high:g}", *[""] * (rows - 2), f"{up.low:g}"]
    for label, row in zip_longest(labels[:rows], drawn, fillvalue=""):
        tick = "┤" if label else "│"
        yield _line(width, (f"{label:>{_LABEL - 1}}{tick}", "dim"), (row, curve.style))
    names = [phase.name for phase in state.phases] if borders else ["epoch"]
    yield _line(width, (f"{'└':>{_LABEL}}{draw_axis(room, across, names, borders)}", "dim"))


def _line(width: int, *parts: tuple[str, str]) -> Text:
    line = Text.assemble(*parts, no_wrap=True, overflow="crop")
    line.truncate(width, pad=True)
    return line


def _from_zero(seen: Sequence[float]) -> Range:
    """From 0 to the next number that is short to write."""
    highest = max(seen)
    if highest <= 0:
        return Range(0, 1)
    power = 10.0 ** math.floor(math.log10(highest))
    ends = (factor * power for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10))
    return Range(0, next(end for end in ends if end >= highest))


def _status(run: RunState | str) -> str:
    return "unreadable" if isinstance(run, str) else run.status


def _cells(run: RunState | str) -> dict[str, str]:
    if isinstance(run, str):
        return {heading: "unreadable" if heading == "state" else "–" for heading in _HEADINGS}
    last = run.history[-1] if run.history else {}
    loss, trained, sparsity = (
        curve.write(curve.factor * last[curve.key]) if is_number(last.get(curve.key)) else "–"
        for curve in _CURVES
    )
    filled = round(_BAR * run.epoch / run.epochs)
    return {
        "state": run.status,
        "progress": "█" * filled + "░" * (_BAR - filled),
        "epoch": f"{run.epoch}/{run.epochs}",
        "loss": loss,
        "trained": trained,
        "sparsity": sparsity,
        "test": "–" if run.record is None else f"{run.record['test']['accuracy']:.2f} %",
    }


def _shortened(name: str, room: int | None) -> str:
    """The end of a name, where runs of a sweep differ."""
    if room is None or len(name) <= max(2, room):
        return name
    return "…" + name[1 - max(2, room) :]
