"""Sweeps that are small enough for tests, and the processes that they start."""

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
    """Return the ids of the processes that train runs of the sweep."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended
            continue
        if "probmask.sweeps.training_process" in arguments and any(
            str(out) in each for each in arguments
        ):
            found.append(int(entry.name))
    return found


def wait_for_none(out: Path, seconds: float = 60) -> None:
    """Wait until no process trains a run of the sweep."""
    end = time.monotonic() + seconds
    while trainings_in(out):
        assert time.monotonic() < end, "a training process has outlived its sweep"
        time.sleep(0.1)


def run_and_exit(arguments: list[str]) -> None:
    """Run `probmask` and exit with its code."""
    sys.exit(main(arguments))
