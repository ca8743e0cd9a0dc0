"""Draw runs for `probmask watch`: curves in Braille characters, and a table of runs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from probmask.checks import is_number
from probmask.cli.terminal import add_row, verbatim
from probmask.messages import printable
from probmask.training.run_directory import RunState

_LABEL = 6  # characters of the labels left of a curve
_HEAD = 2  # lines above the curves
_PANEL = 40  # curves are drawn next to each other if each gets this many characters
_TALLEST = 16  # largest number of rows of a curve
_BAR = 10  # characters of a progress bar
# Columns of the table of runs, with the terminal width from which each is shown.
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
# A Braille character has two columns of four dots: the bit of each dot, by column and row.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BLANK = 0x2800
_BORDER, _LINE, _CROSSING = "┊", "─", "┴"


@dataclass(frozen=True)
class Range:
    """The range of values of an axis."""

    low: float
    high: float

    def index(self, value: float, count: int) -> int:
        """Map a value to one of `count` positions; values outside the range map to its ends."""
        width = self.high - self.low
        fraction = (value - self.low) / width if width > 0 else 0.5
        return math.floor(min(1.0, max(0.0, fraction)) * (count - 1) + 0.5)


@dataclass(frozen=True)
class _Curve:
    """A metric of the log: how its curve is drawn and its values are written."""

    key: str
    title: str
    style: str
    factor: float
    format: Callable[[float], str]
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


def render_run(state: RunState, *, width: int, height: int, seconds_left: float | None) -> Group:
    """Draw the curves of a run in at most `height` lines, with its state above them."""
    shown = state.at_work
    head = [verbatim(_title(state), "bold"), verbatim(state_line(state, seconds_left))]
    curves = [curve for curve in _CURVES if _values(shown.history, curve)]
    if not curves:
        note = [Text("the first epoch has not finished", style="dim")] if _unfinished(state) else []
        return Group(*head, *note)
    columns = len(curves) if width >= len(curves) * _PANEL else 1
    rows = (height - _HEAD) // (len(curves) // columns) - 2
    size = {"width": width // columns - (columns > 1), "rows": min(_TALLEST, max(1, rows))}
    panels = [list(_panel(shown, curve, **size)) for curve in curves]
    if columns == 1:
        return Group(*head, *(line for panel in panels for line in panel))
    return Group(*head, *(Text(" ").join(lines) for lines in zip(*panels, strict=True)))


def state_line(state: RunState, seconds_left: float | None = None) -> str:
    """Describe the progress of a run in one line."""
    shown = state.at_work
    words: list[str] = [state.status]
    if shown is not state:
        words.append("training its dense twin first")
    words.append(f"epoch {shown.epoch} of {shown.epochs}")
    if len(shown.phases) > 1 and _unfinished(state):
        name = shown.phases[shown.phase].name
        words.append(f"phase {shown.phase + 1} of {len(shown.phases)}: {name}")
    if seconds_left is not None and state.status == "training":
        words.append(f"{format_time(seconds_left)} left")
    if shown.damaged_lines:
        words.append(f"skipped {shown.damaged_lines:,} damaged lines of metrics.jsonl")
    return " · ".join(words)


def format_time(seconds: float) -> str:
    """Write seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def render_runs(
    root: Path,
    runs: Mapping[Path, RunState | str],
    *,
    width: int | None = None,
    height: int | None = None,
) -> Group:
    """Draw a table with a row per run, active runs first, and the errors of unreadable runs.

    Without a size, nothing is truncated.
    """
    ordered = sorted(runs, key=lambda path: (_ORDER.index(_status(runs[path])), path))
    counts = {status: sum(_status(run) == status for run in runs.values()) for status in _ORDER}
    head = f"{root}: {len(runs)} runs, " + ", ".join(
        f"{count} {status}" for status, count in counts.items() if count
    )
    # Six lines are the title, the headings, the rules and the last line.
    room = len(ordered) if height is None else max(1, height - 6)
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
        name = _truncated(printable(str(path.relative_to(root))), left)
        add_row(table, name, *(row[heading] for heading in shown))
    lines: list[Text | Table] = [_one_line(head), table]
    if room < len(ordered):
        lines.append(Text(f"… and {len(ordered) - room} more", style="dim"))
    lines += [
        verbatim(f"{path.relative_to(root)}: {reason}")
        for path, reason in runs.items()
        if isinstance(reason, str) and height is None
    ]
    return Group(*lines)


def run_summary(state: RunState) -> dict[str, Any]:
    """Return the state of a run for JSON, without its curves."""
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
        "damaged_lines": state.damaged_lines,
        "phase": state.phases[state.phase].name,
        **{curve.key: last.get(curve.key) for curve in _CURVES},
        "test_accuracy": None if state.record is None else state.record["test"]["accuracy"],
    }


def run_details(state: RunState) -> dict[str, Any]:
    """Return the state of a run for JSON, with its curves, record and dense twin."""
    history = [
        {key: value for key, value in line.items() if key != "histograms"} for line in state.history
    ]
    return {
        **run_summary(state),
        "phases": [{"name": phase.name, "epochs": phase.epochs} for phase in state.phases],
        "history": history,
        "record": state.record,
        "dense": None if state.twin is None else run_details(state.twin),
    }


def draw_curve(
    points: Iterable[tuple[float, float]],
    *,
    width: int,
    height: int,
    across: Range,
    up: Range,
    borders: Sequence[float] = (),
) -> list[str]:
    """Draw straight lines between points in `height` rows of `width` characters.

    A point that is not finite interrupts the curve. Each of the `borders` is a vertical line
    behind the curve.
    """
    cells = [[0] * width for _ in range(height)]
    for x, y in _dots(points, across, up, width=2 * width, height=4 * height):
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    marked = {_column(border, across, width) for border in borders}
    return [
        "".join(
            chr(_BLANK + dots) if dots else _BORDER if column in marked else " "
            for column, dots in enumerate(row)
        )
        for row in cells
    ]


def draw_axis(
    width: int, across: Range, names: Sequence[str], borders: Sequence[float] = ()
) -> str:
    """Draw the axis below a curve: its ends, and the names of the sections between `borders`.

    A name that does not fit is omitted.
    """
    line = [_LINE] * width
    columns = [_column(border, across, width) for border in borders]
    for name, (begin, end) in zip(names, pairwise([-1, *columns, width]), strict=True):
        if end - begin - 1 >= len(name) + 2 * len(f"{across.high:g}") + 2:
            first = begin + 1 + (end - begin - 1 - len(name)) // 2
            line[first : first + len(name)] = name
    for column in columns:
        line[column] = _CROSSING
    last = f"{across.high:g}"
    line[width - len(last) :] = last
    first_value = f"{across.low:g}"
    if across.high > across.low:
        line[: len(first_value)] = first_value
    return "".join(line)


def _unfinished(state: RunState) -> bool:
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
    """Draw a curve with its title, its current value and its axes."""
    points = _values(state.history, curve)
    finite = [value for _, value in points if math.isfinite(value)]
    up = curve.range(finite) if finite else Range(0, 1)
    across = Range(1, state.epochs)
    borders = [end + 0.5 for end in accumulate(phase.epochs for phase in state.phases)][:-1]
    yield _line(width, (f"{'':{_LABEL}}{curve.title} ", "bold"), (curve.format(points[-1][1]), ""))
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
    """Return a range from 0 to the next round number."""
    highest = max(seen)
    if highest <= 0:
        return Range(0, 1)
    power = 10.0 ** math.floor(math.log10(highest))
    ends = (factor * power for factor in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10))
    return Range(0, next((end for end in ends if end >= highest), highest))


def _status(run: RunState | str) -> str:
    return "unreadable" if isinstance(run, str) else run.status


def _cells(run: RunState | str) -> dict[str, str]:
    if isinstance(run, str):
        return {heading: "unreadable" if heading == "state" else "–" for heading in _HEADINGS}
    last = run.history[-1] if run.history else {}
    loss, trained, sparsity = (
        curve.format(curve.factor * last[curve.key]) if is_number(last.get(curve.key)) else "–"
        for curve in _CURVES
    )
    filled = min(_BAR, round(_BAR * run.epoch / run.epochs))
    return {
        "state": run.status,
        "progress": "█" * filled + "░" * (_BAR - filled),
        "epoch": f"{run.epoch}/{run.epochs}",
        "loss": loss,
        "trained": trained,
        "sparsity": sparsity,
        "test": "–" if run.record is None else f"{run.record['test']['accuracy']:.2f} %",
    }


def _one_line(text: str) -> Text:
    line = verbatim(text)
    line.overflow, line.no_wrap = "ellipsis", True
    return line


def _truncated(name: str, room: int | None) -> str:
    """Truncate a name at its start, since the names of a sweep differ at their end."""
    if room is None or len(name) <= max(2, room):
        return name
    return "…" + name[1 - max(2, room) :]


def _column(border: float, across: Range, width: int) -> int:
    return across.index(border, 2 * width) // 2


def _dots(
    points: Iterable[tuple[float, float]], across: Range, up: Range, *, width: int, height: int
) -> Iterable[tuple[int, int]]:
    """Yield the dots of the curve, counted from the upper left corner."""
    last: tuple[int, int] | None = None
    for x, y in points:
        if not math.isfinite(y):
            last = None
            continue
        dot = across.index(x, width), height - 1 - up.index(y, height)
        yield from _straight(last or dot, dot)
        last = dot


def _straight(begin: tuple[int, int], end: tuple[int, int]) -> Iterable[tuple[int, int]]:
    (x, y), (right, down) = begin, (end[0] - begin[0], end[1] - begin[1])
    steps = max(abs(right), abs(down), 1)
    for step in range(steps + 1):
        yield x + math.floor(right * step / steps + 0.5), y + math.floor(down * step / steps + 0.5)
