"""Runs small enough for tests: a network of 4,264 weights, a few dozen updates."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import nn

from probmask.cli import main
from probmask.errors import InputError
from probmask.models.convnet import conv4, smallconv
from probmask.training.checkpoint import write_checkpoint
from probmask.training.config import TrainConfig, load_config
from probmask.training.run_directory import RunDirectory

SMALL: dict[str, Any] = {
    "model_args.width": 8,
    "batch_size": 256,
    "epochs": 3,
    "select_on": "none",
    "threads": 1,
    "dense_twin": False,
    "tensorboard": False,
}
# The method of each member of the ProbMask family (the fixture `form`).
METHOD_OF_FORM = {"tied": "probmask-tied", "learned": "probmask"}
SIZE = 8 * 1 * 9 + 8 * 8 * 9 + 16 * 8 * 9 + 16 * 16 * 9 + 10 * 16

# Processes are forked from a server that has imported everything, which takes milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["probmask.training.trainer", "probmask.cli.terminal"])


def partly_frozen(**settings: Any) -> nn.Module:
    """Build smallconv with a first layer that is not trained."""
    model = smallconv(**settings)
    next(model.parameters()).requires_grad_(False)
    return model


def conv4_in_double(*, image_size: list[int], **settings: Any) -> nn.Module:
    """Build conv4 with fp64 weights, whose sums are rounded by 1e-16 instead of 1e-7."""
    model = conv4(image_size=image_size, **settings).double()
    model.register_forward_pre_hook(lambda _, inputs: (inputs[0].double(),))
    return model


def tiny() -> nn.Module:
    """Build one layer."""
    return nn.Linear(4, 4)


def large(**_: Any) -> nn.Module:
    """Build a network of 31 million weights for images of 8 by 8 pixels."""
    inner = [layer for _ in range(16) for layer in (nn.Linear(1400, 1400), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1400), *inner, nn.Linear(1400, 10))


def small(**overrides: Any) -> TrainConfig:
    """Return the small configuration; a double underscore stands for the dot of a key."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, [*(SMALL | given).items()])


def flags(**overrides: Any) -> list[str]:
    """Return the same settings as arguments of `probmask train`."""
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    pairs = [(key, _toml(value)) for key, value in (SMALL | given).items()]
    return [part for key, value in pairs for part in ("--set", f"{key}={value}")]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """Call the function in a new process."""
    process = _context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start_command(*arguments: str) -> BaseProcess:
    """Run `probmask` in a new process."""
    return start(main, list(arguments))


def try_lock(path: Path) -> None:
    """Lock the directory of a run, in a process of its own; exit with 3 if it is locked."""
    try:
        with RunDirectory(path).locked():
            pass
    except InputError:
        sys.exit(3)


def kill_when(process: BaseProcess, ready: Callable[[], bool], *, delay: float = 0.0) -> None:
    """Send SIGKILL ``delay`` seconds after ``ready``; fail if the process has ended before."""
    wait_until(ready, process)
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -9, f"it exited early with {process.exitcode}"


def wait_until(ready: Callable[[], bool], process: BaseProcess, *, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert process.is_alive(), f"ended with {process.exitcode}"
        assert time.monotonic() < end, "timed out"
        time.sleep(0.002)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Return every path below the directory with its content (None for directories)."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


class Stopped(BaseException):
    """Ends a run as abruptly as is possible within one process."""


def stop_after_checkpoint(monkeypatch: Any, step: int) -> None:
    """Raise `Stopped` once the checkpoint of this step is written."""

    def write(path: Path, state: Any) -> None:
        write_checkpoint(path, state)
        if state["step"] == step:
            raise Stopped

    monkeypatch.setattr("probmask.training.run.write_checkpoint", write)
