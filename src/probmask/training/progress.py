"""Progress of a run: a bar in a terminal, or lines of text elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

from probmask.messages import printable

_SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment."""

    step: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    sparsity: float

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch}/{self.epochs} loss {self.loss:.3f} "
            f"acc {self.accuracy:.1f}% sparsity {100 * self.sparsity:.1f}%"
        )


class Reporter(Protocol):
    """Shows the progress of a run."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def show(self, status: Status) -> None:
        """Show the state of the run."""


# Makes a reporter for a title and a number of updates.
MakeReporter = Callable[[str, int], Reporter]


class Quiet:
    """Shows nothing."""

    def __init__(self, title: str, total_steps: int) -> None:
        """Accept the arguments of the other reporters."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        """Do nothing."""


class Bar:
    """A progress bar with epoch, loss, accuracy, sparsity and the time left."""

    def __init__(self, title: str, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False),
            BarColumn(bar_width=None),  # the width that the other columns leave
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=Console(stderr=True),
            expand=True,
        )
        self._task = self._progress.add_task(printable(title), total=total_steps, status="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, status: Status) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=status.step, status=str(status))


class Lines:
    """Prints a line after each tenth of the training, and after a long time without one.

    A long time is 30 seconds, or a twentieth of the time so far if that is more, so that a training
    of days does not fill a log.
    """

    def __init__(self, title: str, total_steps: int) -> None:
        self._title, self._total = printable(title), total_steps
        self._first: tuple[int, float] | None = None  # step and time of the first status
        self._tenths = 0
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if self._first is None:  # a resumed run does not start at step 1
            self._first = status.step, now
            self._tenths = 10 * (status.step - 1) // self._total
        tenths = 10 * status.step // self._total
        epoch_ended = status.step % (self._total // status.epochs) == 0
        limit = max(_SECONDS_BETWEEN_LINES, (now - self._first[1]) / 20)
        if (epoch_ended and tenths > self._tenths) or now - self._last_line >= limit:
            self._tenths, self._last_line = tenths, now
            print(f"{self._title}: {status}{self._time_left(status.step, now)}", file=sys.stderr)

    def _time_left(self, step: int, now: float) -> str:
        assert self._first is not None
        first_step, first_time = self._first
        if not first_step < step < self._total:
            return ""
        seconds = round((now - first_time) / (step - first_step) * (self._total - step))
        return f", {timedelta(seconds=seconds)} left"
