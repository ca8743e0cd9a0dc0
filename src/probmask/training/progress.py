"""What a person sees while a network trains: a bar in a terminal, nothing elsewhere."""

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment."""

    step: int
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    sparsity: float


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
            BarColumn(bar_width=8),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(title, total=total_steps, status="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, status: Status) -> None:
        """Move the bar."""
        text = (
            f"epoch {status.epoch}/{status.epochs} loss {status.loss:.3f} "
            f"acc {status.accuracy:.1f}% sparsity {100 * status.sparsity:.1f}%"
        )
        self._progress.update(self._task, completed=status.step, status=text)
