"""The metrics log of a run: JSON lines, and the same numbers for TensorBoard."""

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

_MAX_HISTORY = 100  # lines of the log that a record stores


class MetricsLog:
    """Appends one line per epoch; a resumed run continues at the checkpoint's position."""

    def __init__(self, path: Path, tensorboard: Path | None, *, length: int, step: int) -> None:
        """Open the log and drop everything that was written after the checkpoint.

        Args:
            path: The file of JSON lines.
            tensorboard: Directory for TensorBoard, or None to write none.
            length: Number of bytes of ``path`` to keep.
            step: First step that will be written; TensorBoard hides earlier events from it on.
        """
        path.touch()
        os.truncate(path, min(length, path.stat().st_size))
        self._file = path.open("a", encoding="utf-8")
        self._board = _open_board(tensorboard, step) if tensorboard is not None else None

    @property
    def length(self) -> int:
        """Number of bytes written so far; checkpoints store it."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def write(
        self,
        step: int,
        values: Mapping[str, Any],
        histograms: Mapping[str, Histogram] = MappingProxyType({}),
    ) -> None:
        """Append a line."""
        line = {"step": step, **values}
        if histograms:
            line["histograms"] = {name: asdict(each) for name, each in histograms.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
            for name, histogram in histograms.items():
                _add_histogram(self._board, name, histogram, step)
            # By default TensorBoard writes every two minutes, and a killed run would lose events.
            self._board.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a log.

    An incomplete last line, left by a killed process, is ignored.

    Raises:
        InputError: A complete line is not valid.
    """
    *complete, _ = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(complete, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: line {number} is damaged ({error}).") from error
        if not isinstance(line, dict) or not isinstance(line.get("epoch"), int):
            raise InputError(f"{path}: line {number} does not describe an epoch.")
        lines.append(line)
    return lines


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return about 100 evenly spaced lines of a log, including the last one.

    For every histogram, the last line that contains it is included. An incomplete last line, left
    by a killed process, is ignored.
    """
    *complete, _ = path.read_text(encoding="utf-8").split("\n")
    lines: list[dict[str, Any]] = [json.loads(line) for line in complete]
    stride = -(-len(lines) // _MAX_HISTORY) or 1
    selected = set(range(len(lines) - 1, -1, -stride))
    selected.update(
        {name: at for at, line in enumerate(lines) for name in line.get("histograms", ())}.values()
    )
    return [lines[at] for at in sorted(selected)]


def _add_histogram(board: Any, name: str, histogram: Histogram, step: int) -> None:
    """Write a histogram to TensorBoard; the sums of values are estimated from the bin centers."""
    width = (histogram.high - histogram.low) / len(histogram.counts)
    limits = [histogram.low + width * (index + 1) for index in range(len(histogram.counts))]
    centers = [limit - width / 2 for limit in limits]
    pairs = list(zip(centers, histogram.counts, strict=True))
    board.add_histogram_raw(
        name,
        min=histogram.low,
        max=histogram.high,
        num=sum(histogram.counts),
        sum=sum(center * count for center, count in pairs),
        sum_squares=sum(center * center * count for center, count in pairs),
        bucket_limits=limits,
        bucket_counts=list(histogram.counts),
        global_step=step,
    )


def _open_board(directory: Path, step: int) -> Any:
    # Imported here because it takes a second, which only runs with TensorBoard should pay.
    from torch.utils.tensorboard import SummaryWriter

    _wait_for_the_next_second(directory)
    return SummaryWriter(str(directory), purge_step=step)


def _wait_for_the_next_second(directory: Path) -> None:
    """Wait until our event file gets a later name than the existing ones.

    TensorBoard reads event files in the order of their names, which contain the second at which
    the file was created, and the process id.
    """
    seconds = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    newest = max((int(second) for second in seconds if second.isdigit()), default=0)
    remaining = newest + 1 - time.time()
    if 0 < remaining <= 1:
        time.sleep(remaining)
