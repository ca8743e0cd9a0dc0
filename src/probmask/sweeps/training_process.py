"""A run of a sweep, in a process of its own: `python -m probmask.sweeps.training_process REQUEST`.

It trains as `probmask train` does, and tells the sweep how it stands by lines of JSON. Its standard
input is a pipe that the sweep holds open: when that closes, the sweep is gone, however it ended,
and the run stops. What it has checkpointed stays.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from probmask.training.progress import Status

_GRACE_SECONDS = 10.0
# A run whose sweep was killed takes a moment to notice, and to let go of its directory.
_LOCK_SECONDS = 30.0

Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """What to train, and where; as one argument of a command line."""

    directory: str
    resume: bool
    config: Mapping[str, Any]

    def to_text(self) -> str:
        """The request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The request that was made to text."""
        return cls(**json.loads(text))


def execute(request: Request, tell: Tell) -> None:
    """Train, and tell how it stands, up to its end or the reason why there is none."""
    from probmask.errors import DownloadError, InputError, NonFiniteError

    try:
        _train(request, tell)
    except (OSError, InputError, NonFiniteError, DownloadError) as error:
        tell({"kind": "failed", "reason": str(error)})
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split()) or "no message"
        tell({"kind": "failed", "reason": f"{type(error).__name__}: {reason}"})
    else:
        tell({"kind": "finished"})


def _train(request: Request, tell: Tell) -> None:
    from probmask.training.config import parse_config
    from probmask.training.origins import Origins
    from probmask.training.record_format import NEUTRAL_KEYS
    from probmask.training.run import train
    from probmask.training.run_directory import RunDirectory

    config = parse_config(request.config, origins=Origins("the sweep"))
    directory = RunDirectory(Path(request.directory))
    if request.resume:
        _wait_for_lock(directory.path)
        # As it was begun: it may be on other threads than it would be begun with now.
        begun = directory.read_config()
        config = replace(begun, **{key: getattr(config, key) for key in NEUTRAL_KEYS})

    def make_reporter(title: str, total_steps: int) -> _Telling:
        return _Telling(tell, title, total_steps)

    train(config, out=directory.path, resume=request.resume, make_reporter=make_reporter)


class _Telling:
    """Hands on where the run is."""

    def __init__(self, tell: Tell, title: str, total_steps: int) -> None:
        self._tell, self._title, self._total_steps = tell, title, total_steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, status: "Status") -> None:
        """Tell the sweep."""
        self._tell({"kind": "status", "total_steps": self._total_steps, **asdict(status)})


def _wait_for_lock(path: Path) -> None:
    from probmask.errors import InputError
    from probmask.training.run_directory import RunDirectory

    end = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < end:
        try:
            with RunDirectory(path).locked():
                return
        except InputError:
            time.sleep(0.2)


def _stop_with_the_sweep() -> None:
    """Wait until the sweep lets go of our standard input, then stop."""
    while os.read(0, 1024):
        pass
    _thread.interrupt_main()
    time.sleep(_GRACE_SECONDS)
    os._exit(130)


def main() -> int:
    """Serve one request."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    threading.Thread(target=_stop_with_the_sweep, daemon=True).start()
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is for the log

    from probmask.launch import is_first_rank

    def tell(message: Mapping[str, Any]) -> None:
        if is_first_rank():
            lines.write(json.dumps(message) + "\n")
            lines.flush()

    try:
        execute(Request.from_text(sys.argv[1]), tell)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
