"""`probmask watch`: the curves of a run while it trains, or a table of several."""

import argparse
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.commands.output import print_json
from probmask.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, Group

    from probmask.training.run_directory import RunState

_SECONDS = 1.0  # between two looks
_PATIENCE = 60.0  # seconds without a run at work after which a directory of runs is left


def add(commands: Any) -> None:
    """Add the command and its flags."""
    watch = commands.add_parser(
        "watch",
        help="show the curves of a run while it trains",
        description="Show loss, training accuracy and sparsity by epoch until the run is finished, "
        "or a table of all runs in a directory. Ctrl-C ends the watching, not the run.",
    )
    watch.add_argument("run", type=Path, metavar="RUN", help="directory of a run, or of several")
    watch.add_argument(
        "--once", action="store_true", help="show the present state and end, as into a pipe"
    )
    watch.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Show the run, or the runs, once or until it is over; Ctrl-C is as good an end as any."""
    with suppress(KeyboardInterrupt):
        _watch(options)


def _watch(options: argparse.Namespace) -> None:
    from probmask.training.run_directory import RunReader, find_runs

    reader = RunReader()
    path: Path = options.run
    found = find_runs(path)
    view: _Run | _Runs = _Run(path, reader) if found == [path] else _Runs(path, reader)
    if options.json:
        print_json(view.for_machines())
    elif options.once or not sys.stdout.isatty():
        view.print()
    else:
        _follow(view)


class _Run:
    """One run."""

    def __init__(self, path: Path, reader: Any) -> None:
        self._path, self._reader = path, reader
        self._began: tuple[Path, int, float] | None = None
        self.look()

    def look(self) -> None:
        """Read what has changed."""
        self.state: RunState = self._reader.read(self._path)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self.state.status != "training"

    def picture(self, width: int, height: int) -> "Group":
        """What fits a terminal of this size."""
        from probmask.analysis.watching import show_run

        left = self._seconds_left()
        return show_run(self.state, width=width, height=height, seconds_left=left)

    def print(self) -> None:
        """Print the curves and, of a finished run, what came out."""
        from probmask.analysis.tables import print_training

        console = _console()
        console.print(self.picture(console.width, console.height - 1))
        record, twin = self.state.record, self.state.twin
        if record is not None:
            print()
            print_training(self._path, record, None if twin is None else twin.record)
        elif self.state.status == "stopped":
            place = shlex.quote(str(self.state.owner))
            print(f"stopped; go on with probmask train --resume {place}")

    def for_machines(self) -> Any:
        """The run as JSON has it."""
        from probmask.analysis.watching import in_full

        return in_full(self.state)

    def _seconds_left(self) -> float | None:
        """By the pace of the epochs that were seen to end; the log itself holds no times."""
        shown = self.state.at_work
        if not shown.history:
            return None
        ended = (shown.path / "metrics.jsonl").stat().st_mtime
        if self._began is None or self._began[0] != shown.path or shown.epoch < self._began[1]:
            self._began = shown.path, shown.epoch, ended
        _, first, since = self._began
        if shown.epoch == first:
            return None
        pace = (ended - since) / (shown.epoch - first)
        return max(0.0, pace * (shown.epochs - shown.epoch) - (time.time() - ended))


class _Runs:
    """All runs below a directory, also those that begin later."""

    def __init__(self, root: Path, reader: Any) -> None:
        self._root, self._reader = root, reader
        self._worked: float | None = None
        self.look()

    def look(self) -> None:
        """Find runs, and read what has changed; one that cannot be read does not hide the rest."""
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
            self._worked = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether none is at work; between two of a sweep there may be none for a moment."""
        return self._worked is None or time.monotonic() - self._worked > _PATIENCE

    def picture(self, width: int, height: int) -> "Group":
        """What fits a terminal of this size."""
        from probmask.analysis.watching import show_runs

        return show_runs(self._root, self._runs, width=width, height=height)

    def print(self) -> None:
        """Print the whole table."""
        from probmask.analysis.watching import show_runs

        console = _console()
        width = console.width if console.is_terminal else None
        if width is None:
            console.width = 220  # read by programs and by people later on: nothing is cut
        console.print(show_runs(self._root, self._runs, width=width))

    def for_machines(self) -> Any:
        """The runs as JSON has them."""
        from probmask.analysis.watching import summarized

        return [
            {"directory": str(path), "status": "unreadable", "reason": run}
            if isinstance(run, str)
            else summarized(run)
            for path, run in self._runs.items()
        ]


def _follow(view: _Run | _Runs) -> None:
    """Draw again and again until it is over, or until Ctrl-C; leave the last picture behind."""
    from rich.live import Live

    console = _console()
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while not view.over:
            live.update(view.picture(*console.size), refresh=True)
            time.sleep(_SECONDS)
            view.look()
    view.print()


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
