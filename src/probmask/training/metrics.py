"""The metrics log: JSON lines for tables and plots, and the same numbers for TensorBoard."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from probmask.errors import InputError
from probmask.masking.masker import Histogram

_LONGEST_HISTORY = 100


class MetricsLog:
    """Appends one line per epoch; after a crash it goes on where the checkpoint left it."""

    def __init__(self, path: Path, tensorboard: Path | None, *, length: int, step: int) -> None:
        """Open the log and drop what was written after ``length`` bytes, or after ``step``."""
        path.touch()
        os.truncate(path, min(length, path.stat().st_size))
        self._file = path.open("a", encoding="utf-8")
        self._board = _open_board(tensorboard, step) if tensorboard is not None else None

    @property
    def length(self) -> int:
        """The number of bytes written so far; a checkpoint remembers it."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def write(
        self,
        step: int,
        values: Mapping[str, Any],
        histograms: Mapping[str, Histogram] = MappingProxyType({}),
    ) -> None:
        """Add a line."""
        line = {"step": step, **values}
        if histograms:
            line["histograms"] = {name: asdict(shape) for name, shape in histograms.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            for name, histogram in histograms.items():
                _draw(self._board, name, histogram, step)
            # Now, not within two minutes: a run that is killed goes on behind what it has logged.
            self._board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write out what is still in memory."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """All lines of a log.

    A torn last line, which a process that was killed has left, is passed over.
    """
    *complete, _ = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(complete, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: line {number} is damaged ({error}).") from error
        if not isinstance(line, dict) or not isinstance(line.get("epoch"), int):
            raise InputError(f"{path}: line {number} is not that of an epoch.")
        lines.append(line)
    return lines


def read_history(path: Path) -> list[dict[str, Any]]:
    """The lines of a log: some 100 evenly spaced ones, among them the last.

    The last line that holds a histogram is always there: it may be the only one. A torn last line,
    which a process that was killed has left, is passed over.
    """
    *complete, _ = path.read_text(encoding="utf-8").split("\n")
    lines: list[dict[str, Any]] = [json.loads(line) for line in complete]
    stride = -(-len(lines) // _LONGEST_HISTORY) or 1
    kept = set(range(len(lines) - 1, -1, -stride))
    kept.update(
        {name: at for at, line in enumerate(lines) for name in line.get("histograms", ())}.values()
    )
    return [lines[at] for at in sorted(kept)]


def _draw(board: Any, name: str, histogram: Histogram, step: int) -> None:
    """Hand TensorBoard the counts; sums of values it takes from the middles of the bins."""
    width = (histogram.high - histogram.low) / len(histogram.counts)
    limits = [histogram.low + width * (place + 1) for place in range(len(histogram.counts))]
    middles = [limit - width / 2 for limit in limits]
    pairs = list(zip(middles, histogram.counts, strict=True))
    board.add_histogram_raw(
        name,
        min=histogram.low,
        max=histogram.high,
        num=sum(histogram.counts),
        sum=sum(middle * count for middle, count in pairs),
        sum_squares=sum(middle * middle * count for middle, count in pairs),
        bucket_limits=limits,
        bucket_counts=list(histogram.counts),
        global_step=step,
    )


def _open_board(directory: Path, step: int) -> Any:
    # TensorBoard takes a second to import, so only a run that logs to it pays for it.
    from torch.utils.tensorboard import SummaryWriter

    _wait_for_the_next_second(directory)
    return SummaryWriter(str(directory), purge_step=step)


def _wait_for_the_next_second(directory: Path) -> None:
    """Let a file that another process began within this second be the earlier one by its name.

    TensorBoard reads files in the order of their names, which say the second and the process.
    """
    seconds = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdigit()), default=0)
    rest = newest + 1 - time.time()
    if 0 < rest <= 1:
        time.sleep(rest)
