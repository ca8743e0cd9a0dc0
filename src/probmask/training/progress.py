"""What a person sees while a network trains: a bar in a terminal, some lines in a file."""

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Protocol, Self

_LONGEST_SILENCE = 30.0  # seconds, in the first ten minutes


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
        """Show where the run is."""


class Quiet:
    """Shows nothing."""

    def __init__(self, title: str, total_steps: int) -> None:
        """Take what a bar takes, and need none of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        """Show nothing."""


class Bar:
    """A progress bar with epoch, loss, accuracy, sparsity and the time left."""

    def __init__(self, title: str, total_steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),  # what the others leave
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=Console(stderr=True),
            expand=True,
        )
        self._task = self._progress.add_task(title, total=total_steps, status="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, status: Status) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=status.step, status=str(status))


class Lines:
    """A line after each tenth of the training, and after a silence that has become long.

    Silences are as long as a twentieth of the time so far, so that days do not fill a log.
    """

    def __init__(self, title: str, total_steps: int) -> None:
        self._title, self._total = title, total_steps
        self._began: tuple[int, float] | None = None
        self._tenths = 0
        self._spoke = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        """Print a line if it is time for one."""
        now = time.monotonic()
        if self._began is None:  # of a resumed run not the first update
            self._began = status.step, now
            self._tenths = 10 * (status.step - 1) // self._total
        begun = self._began[1]
        tenths = 10 * status.step // self._total
        epoch_ended = status.step % (self._total // status.epochs) == 0
        silence = max(_LONGEST_SILENCE, (now - begun) / 20)
        if (epoch_ended and tenths > self._tenths) or now - self._spoke >= silence:
            self._tenths, self._spoke = tenths, now
            print(f"{self._title}: {status}{self._left(status.step, now)}", file=sys.stderr)

    def _left(self, step: int, now: float) -> str:
        assert self._began is not None
        first, begun = self._began
        if not first < step < self._total:
            return ""
        seconds = round((now - begun) / (step - first) * (self._total - step))
        return f", {timedelta(seconds=seconds)} left"
