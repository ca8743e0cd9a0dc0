"""Sweeps small enough for tests, and looks at the processes they start."""

import sys
import time
from pathlib import Path

from probmask.cli import main

RUN = """
[run]
model_args = { width = 8 }
batch_size = 256
epochs = 2
select_on = "none"
tensorboard = false
"""


def write_sweep(path: Path, grid: str, run: str = "") -> Path:
    """Write the file of a sweep of small runs."""
    path.write_text(f"{RUN}{run}\n{grid}")
    return path


def trainings_in(out: Path) -> list[int]:
    """The processes that train in a directory of that sweep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it is gone by now
            continue
        if "probmask.sweeps.training_process" in arguments and any(
            str(out) in each for each in arguments
        ):
            found.append(int(entry.name))
    return found


def wait_for_none(out: Path, seconds: float = 60) -> None:
    """Wait until nothing trains there any more."""
    end = time.monotonic() + seconds
    while trainings_in(out):
        assert time.monotonic() < end, "a training has outlived its sweep"
        time.sleep(0.1)


def run_and_exit(arguments: list[str]) -> None:
    """Run `probmask` and end the process with its code."""
    sys.exit(main(arguments))
