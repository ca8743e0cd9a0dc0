"""The process that trains one run of a sweep: `python -m probmask.sweeps.training_process REQUEST`.

It trains as `probmask train` does, and sends its status to the sweep as lines of JSON on standard
output. Its standard input is a pipe that the sweep holds open. When the pipe closes, the sweep has
ended, even if it was killed, and the process stops. Its checkpoint stays.

PyTorch is imported only after the watch on the pipe has started, because the import takes seconds.
"""

import _thread
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from probmask.errors import DownloadError, InputError, NonFiniteError
from probmask.launch import is_first_rank
from probmask.messages import one_line
from probmask.training.progress import Status

_SECONDS_TO_STOP = 10.0
# A process whose sweep was killed needs a moment to notice it and to release its directory.
_LOCK_SECONDS = 30.0

Send = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """The run to train; passed as one argument of the command line.

    Args:
        directory: Directory of the run.
        resume: Whether the directory contains an unfinished run.
        config: Configuration as a table.
    """

    directory: str
    resume: bool
    config: Mapping[str, Any]

    def to_text(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the request that `to_text` wrote."""
        return cls(**json.loads(text))


def execute(request: Request, send: Send) -> None:
    """Train the run; send its status, then a message that it finished or why it failed."""
    try:
        _train(request, send)
    except (OSError, InputError, NonFiniteError, DownloadError) as error:
        send({"kind": "failed", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        reason = one_line(error) or "no message"
        send({"kind": "failed", "reason": f"{type(error).__name__}: {reason}"})
    else:
        send({"kind": "finished"})


def _train(request: Request, send: Send) -> None:
    from probmask.training.config import parse_config
    from probmask.training.origins import Origins
    from probmask.training.record_format import NEUTRAL_KEYS
    from probmask.training.run_directory import RunDirectory
    from probmask.training.trainer import train

    config = parse_config(request.config, origins=Origins("the sweep"))
    directory = RunDirectory(Path(request.directory))
    if request.resume:
        with suppress(InputError), directory.locked(timeout=_LOCK_SECONDS):
            pass  # a process of a killed sweep has released the directory
        # Keep the settings that the run was started with, such as its number of threads. But the
        # grid alone, never a file in the directory, decides which network is imported.
        started = directory.read_config()
        given = {key: getattr(config, key) for key in NEUTRAL_KEYS | {"model"}}
        config = replace(started, **given)

    def make_reporter(_: str, total_steps: int) -> _StatusSender:
        return _StatusSender(send, total_steps)

    train(config, out=directory.path, resume=request.resume, make_reporter=make_reporter)


class _StatusSender:
    """Reporter that sends every status to the sweep."""

    def __init__(self, send: Send, total_steps: int) -> None:
        self._send, self._total_steps = send, total_steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: Status) -> None:
        """Send the status."""
        self._send({"kind": "status", "total_steps": self._total_steps, **asdict(status)})


def _stop_with_the_sweep() -> None:
    """Wait until the sweep closes our standard input, then stop."""
    while os.read(0, 1024):
        pass
    _thread.interrupt_main()
    time.sleep(_SECONDS_TO_STOP)
    os._exit(130)


def main() -> int:
    """Execute the request in the first argument; return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
    threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to the log

    def send(message: Mapping[str, Any]) -> None:
        if is_first_rank():
            lines.write(json.dumps(message) + "\n")
            lines.flush()

    try:
        execute(Request.from_text(sys.argv[1]), send)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
