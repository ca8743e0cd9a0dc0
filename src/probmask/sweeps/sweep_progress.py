"""Progress of a sweep: a line of text per event, or a live table in a terminal."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from probmask.analysis.records import Run
from probmask.messages import printable

_MAX_ROWS = 20  # the table hides further runs, so that it fits a terminal


@dataclass
class _RunningRun:
    """A run in progress: its last status, and the first one, from which its speed is estimated."""

    started: float = field(default_factory=time.monotonic)
    status: Mapping[str, Any] | None = None
    first_step: int = 0
    first_time: float = 0.0

    def update(self, status: Mapping[str, Any]) -> None:
        if self.status is None:
            self.first_step, self.first_time = int(status["step"]), time.monotonic()
        self.status = status

    def seconds_left(self) -> float | None:
        if self.status is None or self.status["step"] <= self.first_step:
            return None
        speed = (self.status["step"] - self.first_step) / (time.monotonic() - self.first_time)
        return float((self.status["total_steps"] - self.status["step"]) / speed)


class SweepProgress:
    """Counts the runs of a sweep, and prints a line when a run starts, finishes or fails.

    Args:
        total: Number of runs of the sweep.
        done: Number of runs that were finished before.
        failed: Number of runs that failed before.
        print_line: Function that prints a line.
    """

    def __init__(
        self, total: int, *, done: int, failed: int, print_line: Callable[[str], None]
    ) -> None:
        self.total, self.done, self.failed = total, done, failed
        self.print_line = print_line
        self.running: dict[str, _RunningRun] = {}
        self._started = time.monotonic()
        self._done_here = 0

    def start(self, name: str, *, resumed: bool) -> None:
        """Count a run that starts or resumes."""
        self.running[name] = _RunningRun()
        self.print_line(f"{name}: {'resumed' if resumed else 'started'}")

    def update(self, name: str, status: Mapping[str, Any]) -> None:
        """Store the status that a run has sent."""
        self.running[name].update(status)

    def finish(self, name: str, run: Run) -> None:
        """Count a finished run."""
        seconds = time.monotonic() - self.running.pop(name).started
        self.done += 1
        self._done_here += 1
        result = f"{run.shown_accuracy} in {format_duration(seconds)}"
        self.print_line(f"[{self.done}/{self.total}] {name}: {result}")

    def fail(self, name: str, reason: str) -> None:
        """Count a failed run."""
        del self.running[name]
        self.failed += 1
        self.print_line(f"{name}: failed: {reason}")

    def summary(self) -> str:
        """Return the counts and the estimated time left in one line."""
        waiting = self.total - self.done - self.failed - len(self.running)
        parts = [f"{self.done} of {self.total} done", f"{len(self.running)} running"]
        parts += [f"{waiting} waiting"] if waiting else []
        parts += [f"{self.failed} failed"] if self.failed else []
        left = self._seconds_left(waiting)
        return ", ".join(parts) + ("" if left is None else f"; about {format_duration(left)} left")

    def _seconds_left(self, waiting: int) -> float | None:
        """Estimate the time left, assuming that all runs take equally long."""
        if self._done_here:
            per_run = (time.monotonic() - self._started) / self._done_here
            return per_run * (waiting + len(self.running) / 2)
        left = [run.seconds_left() for run in self.running.values()]
        known = [seconds for seconds in left if seconds is not None]
        return max(known) if known and not waiting else None


@contextmanager
def live_table(progress: SweepProgress) -> Iterator[None]:
    """Show a table of the running runs in the terminal, and print lines above it."""
    console = Console(stderr=True, highlight=False)

    def print_above(line: str) -> None:
        console.print(Text(printable(line)), soft_wrap=True)

    before, progress.print_line = progress.print_line, print_above
    try:
        with Live(
            console=console,
            get_renderable=lambda: progress_table(progress),
            refresh_per_second=2,
            transient=True,
        ):
            yield
    finally:
        progress.print_line = before


def progress_table(progress: SweepProgress) -> Table:
    """Return a table with a row per running run and the summary below it."""
    table = Table(
        box=SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
        caption=Text(progress.summary()),
        caption_justify="left",
    )
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    for heading in ("epoch", "loss", "accuracy", "sparsity", "left"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, run in list(progress.running.items())[:_MAX_ROWS]:
        table.add_row(Text(printable(name.rpartition("-")[0] or name)), *_cells(run))
    return table


def _cells(run: _RunningRun) -> tuple[str, ...]:
    status = run.status
    if status is None:
        return ("–",) * 5
    left = run.seconds_left()
    return (
        f"{status['epoch']}/{status['epochs']}",
        f"{status['loss']:.3f}",
        f"{status['accuracy']:.1f} %",
        f"{100 * status['sparsity']:.1f} %",
        "–" if left is None else format_duration(left),
    )


def format_duration(seconds: float) -> str:
    """Return a duration as text in one unit, such as "10 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"
