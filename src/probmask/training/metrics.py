"""The metrics log of a run: JSON lines, and the same numbers for TensorBoard."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NotRequired, Self, TypedDict

from probmask.checks import Range
from probmask.errors import InputError
from probmask.files import naming, read_bounded, write_atomically
from probmask.masking.masker import Histogram
from probmask.parsing import parse_json
from probmask.schema import mismatch
from probmask.training.record_format import HistogramTable
from probmask.training.tensorboard_log import TensorBoardLog

_LARGEST_LOG = 2**26  # bytes: hundreds of thousands of epochs
_MAX_HISTORY = 100  # lines of the log that a record stores


class _Line(TypedDict):
    """What readers of a log rely on."""

    epoch: Annotated[int, Range(1, meaning="a whole number")]
    histograms: NotRequired[dict[str, HistogramTable]]


class MetricsLog:
    """One line per epoch: in memory for checkpoints and the record, in a file for readers.

    The file may lag behind the checkpoint after a power failure, or be damaged. A resumed run
    therefore writes it again from the lines in the checkpoint.
    """

    def __init__(
        self, path: Path, tensorboard: Path | None, *, lines: Sequence[str] = (), step: int = 1
    ) -> None:
        """Replace the file by ``lines``, and open it for more.

        Args:
            path: The file of JSON lines.
            tensorboard: Directory for TensorBoard, or None to write none.
            lines: Lines of the checkpoint.
            step: First step that will be written; TensorBoard hides earlier events from it on.
        """
        self.lines = list(lines)
        self._path = path
        write_atomically(path, self.text.encode(), overwrite=True)
        self._file = path.open("a", encoding="utf-8")
        self._board = None if tensorboard is None else TensorBoardLog(tensorboard, step=step)

    @property
    def text(self) -> str:
        """All lines, which checkpoints store."""
        return "".join(f"{line}\n" for line in self.lines)

    def write(
        self,
        step: int,
        values: Mapping[str, Any],
        histograms: Mapping[str, Histogram] = MappingProxyType({}),
    ) -> None:
        """Append a line. Values that are not finite are left out, because JSON has none."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"step": step, **finite}
        if histograms:
            line["histograms"] = {name: asdict(each) for name, each in histograms.items()}
        text = json.dumps(line)
        with naming(self._path):
            self._file.write(f"{text}\n")
            self._file.flush()
        self.lines.append(text)
        if self._board is not None:
            self._board.write(step, finite, histograms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        with suppress(OSError):  # after a failed write, which has raised
            self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a log, and the number of damaged lines, which are skipped.

    An incomplete last line is ignored: the run is writing it, or was killed while it did.

    Raises:
        InputError: The file cannot be read.
    """
    *complete, _ = read_bounded(path, most=_LARGEST_LOG).split(b"\n")
    lines = []
    for text in complete:
        with suppress(InputError):
            lines.append(_parse(text, str(path)))
    return lines, len(complete) - len(lines)


def check_text(text: str, *, epochs: int, where: str) -> list[str]:
    """Return the lines of a log, after checking that they describe ``epochs`` epochs in order.

    Raises:
        InputError: The text is not such a log. The message starts with ``where``.
    """
    *lines, rest = text.split("\n")
    found = [
        _parse(line.encode(), f"{where}: line {n}")["epoch"] for n, line in enumerate(lines, 1)
    ]
    if rest or found != list(range(1, epochs + 1)):
        raise InputError(f"{where}: does not have a line for each of the first {epochs} epochs.")
    return lines


def thin_history(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return about 100 evenly spaced lines of a log, including the last one.

    For every histogram, the last line that contains it is included.
    """
    parsed: list[dict[str, Any]] = [json.loads(line) for line in lines]
    stride = -(-len(parsed) // _MAX_HISTORY) or 1
    selected = set(range(len(parsed) - 1, -1, -stride))
    selected.update(
        {name: at for at, line in enumerate(parsed) for name in line.get("histograms", ())}.values()
    )
    return [parsed[at] for at in sorted(selected)]


def _parse(text: bytes, where: str) -> dict[str, Any]:
    line: Any = parse_json(text, source=where)
    wrong = mismatch(line, _Line)
    if wrong is not None:
        raise InputError(f"{where} does not describe an epoch: {wrong}.")
    table: dict[str, Any] = line
    return table
