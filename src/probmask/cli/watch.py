"""`probmask watch`: show the curves of a run while it trains, or a table of several runs."""

import argparse
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.terminal import PIPE_WIDTH, print_json, print_text, print_training
from probmask.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from probmask.training.run_directory import RunReader, RunState

_REFRESH_SECONDS = 1.0
_IDLE_SECONDS = 60.0  # watching several runs ends when none has trained for this long


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    watch = commands.add_parser(
        "watch",
        help="show the curves of a run while it trains",
        description="Show loss, training accuracy and sparsity by epoch until the run finishes, or "
        "a table of all runs in a directory. Ctrl-C stops the display, not the run.",
    )
    watch.add_argument("run", type=Path, metavar="RUN", help="directory of one run or of several")
    watch.add_argument("--once", action="store_true", help="print the current state once and exit")
    watch.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Show the run or the runs, once or until they finish; Ctrl-C exits normally."""
    with suppress(KeyboardInterrupt):
        _watch(options)


def _watch(options: argparse.Namespace) -> None:
    from probmask.training.run_directory import RunReader, find_runs

    reader = RunReader()
    path: Path = options.run
    found = find_runs(path)
    view: _RunView | _TableView = (
        _RunView(path, reader) if found == [path] else _TableView(path, reader)
    )
    if options.json:
        print_json(view.as_json())
    elif options.once or not sys.stdout.isatty():
        view.print()
    else:
        _follow(view)


class _RunView:
    """The view of one run."""

    def __init__(self, path: Path, reader: "RunReader") -> None:
        self._path, self._reader = path, reader
        self._first_seen: tuple[Path, int, float] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read the current state."""
        self.state: RunState = self._reader.read(self._path)

    @property
    def finished(self) -> bool:
        """Whether the run no longer trains."""
        return self.state.status != "training"

    def render(self, width: int, height: int) -> "Group":
        """Draw the curves for a terminal of this size."""
        from probmask.cli.dashboard import render_run

        left = self._seconds_left()
        return render_run(self.state, width=width, height=height, seconds_left=left)

    def print(self) -> None:
        """Print the curves, and the result if the run has finished."""
        console = _console()
        console.print(self.render(console.width, console.height - 1))
        record, twin = self.state.record, self.state.twin
        if record is not None:
            print_text()
            print_training(self._path, record, None if twin is None else twin.record)
        elif self.state.status == "stopped":
            directory = shlex.quote(str(self.state.owner))
            print_text(f"stopped; continue with probmask train --resume {directory}")

    def as_json(self) -> Any:
        """Return the state with its curves."""
        from probmask.cli.dashboard import run_details

        return run_details(self.state)

    def _seconds_left(self) -> float | None:
        """Estimate the remaining time from the epochs watched so far; the log has no times."""
        shown = self.state.at_work
        if not shown.history:
            return None
        ended = (shown.path / "metrics.jsonl").stat().st_mtime
        seen = self._first_seen
        if seen is None or seen[0] != shown.path or shown.epoch < seen[1]:
            seen = self._first_seen = shown.path, shown.epoch, ended
        _, first, since = seen
        if shown.epoch == first:
            return None
        pace = (ended - since) / (shown.epoch - first)
        return max(0.0, pace * (shown.epochs - shown.epoch) - (time.time() - ended))


class _TableView:
    """The view of all runs below a directory, including runs that start later."""

    def __init__(self, root: Path, reader: "RunReader") -> None:
        self._root, self._reader = root, reader
        self._last_active: float | None = None
        self.refresh()

    def refresh(self) -> None:
        """Find the runs and read their states; an unreadable run is shown with its error."""
        from probmask.training.run_directory import find_runs

        self._runs: dict[Path, RunState | str] = {}
        for path in find_runs(self._root):
            try:
                self._runs[path] = self._reader.read(path)
            except (InputError, OSError) as error:
                self._runs[path] = str(error)
        if any(
            not isinstance(run, str) and run.status == "training" for run in self._runs.values()
        ):
            self._last_active = time.monotonic()

    @property
    def finished(self) -> bool:
        """Whether no run trains; between two runs of a sweep there can be a short gap."""
        idle_since = self._last_active
        return idle_since is None or time.monotonic() - idle_since > _IDLE_SECONDS

    def render(self, width: int, height: int) -> "Group":
        """Draw the table for a terminal of this size."""
        from probmask.cli.dashboard import render_runs

        return render_runs(self._root, self._runs, width=width, height=height)

    def print(self) -> None:
        """Print the whole table."""
        from probmask.cli.dashboard import render_runs

        console = _console()
        width = console.width if console.is_terminal else None
        if width is None:
            console.width = PIPE_WIDTH
        console.print(render_runs(self._root, self._runs, width=width))

    def as_json(self) -> Any:
        """Return a summary of each run."""
        from probmask.cli.dashboard import run_summary

        return [
            {"directory": str(path), "status": "unreadable", "reason": run}
            if isinstance(run, str)
            else run_summary(run)
            for path, run in self._runs.items()
        ]


def _follow(view: _RunView | _TableView) -> None:
    """Redraw the view until it finishes or Ctrl-C is pressed, then print its final state."""
    from rich.live import Live

    console = _console()
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not view.finished:
            live.update(view.render(*console.size), refresh=True)
            time.sleep(_REFRESH_SECONDS)
            view.refresh()
    view.print()


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)
