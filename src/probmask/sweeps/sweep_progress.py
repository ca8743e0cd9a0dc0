"""What a person sees of a sweep: a live table in a terminal, a line per event elsewhere."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from probmask.analysis.records import Run

if TYPE_CHECKING:
    from rich.table import Table

_HIDDEN_AFTER = 20  # more runs at once than rows that fit


@dataclass
class _Running:
    """A run in progress: its last status, and from when and where its speed is reckoned."""

    begun: float = field(default_factory=time.monotonic)
    status: Mapping[str, Any] | None = None
    first_step: int = 0
    first_seen: float = 0.0

    def show(self, status: Mapping[str, Any]) -> None:
        if self.status is None:
            self.first_step, self.first_seen = int(status["step"]), time.monotonic()
        self.status = status

    def seconds_left(self) -> float | None:
        if self.status is None or self.status["step"] <= self.first_step:
            return None
        speed = (self.status["step"] - self.first_step) / (time.monotonic() - self.first_seen)
        return float((self.status["total_steps"] - self.status["step"]) / speed)


class Board:
    """Keeps count of a sweep, and says a line whenever a run begins, ends or fails."""

    def __init__(self, total: int, *, done: int, failed: int, say: Callable[[str], None]) -> None:
        self.total, self.done, self.failed = total, done, failed
        self.running: dict[str, _Running] = {}
        self.began = time.monotonic()
        self.done_here = 0
        self._say = say

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def start(self, name: str, *, resumed: bool) -> None:
        """A run begins, or goes on."""
        self.running[name] = _Running()
        self.say(f"{name}: {'goes on' if resumed else 'begins'}")

    def show(self, name: str, status: Mapping[str, Any]) -> None:
        """A run tells where it is."""
        self.running[name].show(status)

    def finish(self, name: str, run: Run) -> None:
        """A run has come to its end."""
        took = duration(time.monotonic() - self.running.pop(name).begun)
        self.done += 1
        self.done_here += 1
        self.say(f"[{self.done}/{self.total}] {name}: {run.shown_accuracy} in {took}")

    def fail(self, name: str, reason: str) -> None:
        """A run has failed."""
        del self.running[name]
        self.failed += 1
        self.say(f"{name}: failed: {reason}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._say(line)

    def summary(self) -> str:
        """The whole in one line."""
        waiting = self.total - self.done - self.failed - len(self.running)
        parts = [f"{self.done} of {self.total} done", f"{len(self.running)} running"]
        parts += [f"{waiting} to come"] if waiting else []
        parts += [f"{self.failed} failed"] if self.failed else []
        left = self._seconds_left(waiting)
        return ", ".join(parts) + ("" if left is None else f"; about {duration(left)} left")

    def _seconds_left(self, waiting: int) -> float | None:
        """When all will be done if the runs to come take as long as those before them."""
        if self.done_here:
            pace = (time.monotonic() - self.began) / self.done_here
            return pace * (waiting + len(self.running) / 2)
        left = [run.seconds_left() for run in self.running.values()]
        known = [seconds for seconds in left if seconds is not None]
        return max(known) if known and not waiting else None


class LiveBoard(Board):
    """The same as a table that stays in place: a row for every run in progress."""

    def __init__(self, total: int, *, done: int, failed: int, say: Callable[[str], None]) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(total, done=done, failed=failed, say=say)
        self._live = Live(
            console=Console(stderr=True, highlight=False),
            get_renderable=self.table,
            refresh_per_second=2,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the table."""
        self._live.console.print(line, markup=False, soft_wrap=True)

    def table(self) -> "Table":
        """What is running."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=SIMPLE_HEAD,
            header_style="bold",
            pad_edge=False,
            caption=Text(self.summary()),
            caption_justify="left",
        )
        table.add_column("run", overflow="ellipsis", no_wrap=True)
        for heading in ("epoch", "loss", "accuracy", "sparsity", "left"):
            table.add_column(heading, justify="right", no_wrap=True)
        for name, run in list(self.running.items())[:_HIDDEN_AFTER]:
            table.add_row(Text(name.rpartition("-")[0] or name), *_cells(run))
        return table


def _cells(run: _Running) -> tuple[str, ...]:
    status = run.status
    if status is None:
        return ("–",) * 5
    left = run.seconds_left()
    return (
        f"{status['epoch']}/{status['epochs']}",
        f"{status['loss']:.3f}",
        f"{status['accuracy']:.1f} %",
        f"{100 * status['sparsity']:.1f} %",
        "–" if left is None else duration(left),
    )


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"
