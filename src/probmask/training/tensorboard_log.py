"""The numbers of a run for TensorBoard.

The events are written here and not by PyTorch's ``SummaryWriter``, whose thread prints a traceback
when the disk is full, and which cannot continue afterwards.
"""

import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from probmask.errors import TensorBoardWarning
from probmask.masking.masker import Histogram


class TensorBoardLog:
    """Writes an event file. If that fails, it warns once and writes nothing more.

    A training is worth more than the events, which `probmask watch` shows too.
    """

    def __init__(self, directory: Path, *, step: int) -> None:
        """Create an event file; TensorBoard hides earlier events from ``step`` on."""
        # Imported here because it takes a second, which only runs with TensorBoard should pay.
        from tensorboard.compat.proto import event_pb2

        self._directory = directory
        self._file: BinaryIO | None = None
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with self._warning_of_failure():
            directory.mkdir(parents=True, exist_ok=True)
            self._file = _unused_name(directory).open("xb")
            self._append(
                event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"),
                event_pb2.Event(wall_time=time.time(), session_log=session, step=step),
            )

    def write(
        self, step: int, values: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Write the numbers and histograms of an epoch to the disk."""
        if self._file is None:
            return
        from tensorboard.compat.proto import event_pb2, summary_pb2

        entries = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        entries += [
            summary_pb2.Summary.Value(tag=name, histo=_histogram(histogram))
            for name, histogram in histograms.items()
        ]
        summary = summary_pb2.Summary(value=entries)
        with self._warning_of_failure():
            self._append(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what `write` wrote is on the disk already
                file.close()

    def _append(self, *events: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        writer = RecordWriter(self._file)
        for event in events:
            writer.write(event.SerializeToString())
        writer.flush()  # events in memory would be lost when the process is killed

    @contextmanager
    def _warning_of_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            warnings.warn(
                f"{self._directory}: cannot be written ({error.strerror}); the training continues "
                "without TensorBoard.",
                TensorBoardWarning,
                stacklevel=2,
            )


def _unused_name(directory: Path) -> Path:
    """Return a name for an event file that sorts after those of the existing ones.

    TensorBoard reads event files in the order of their names, which contain a time in seconds.
    """
    seconds = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*.*")]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    stamp = max(int(time.time()), newest + 1)
    return directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"


def _histogram(histogram: Histogram) -> Any:
    """Return a histogram for TensorBoard; sums of values are estimated from the bin centers."""
    from tensorboard.compat.proto import summary_pb2

    width = (histogram.high - histogram.low) / len(histogram.counts)
    limits = [histogram.low + width * (index + 1) for index in range(len(histogram.counts))]
    pairs = [(limit - width / 2, n) for limit, n in zip(limits, histogram.counts, strict=True)]
    return summary_pb2.HistogramProto(
        min=histogram.low,
        max=histogram.high,
        num=sum(histogram.counts),
        sum=sum(center * count for center, count in pairs),
        sum_squares=sum(center * center * count for center, count in pairs),
        bucket_limit=limits,
        bucket=histogram.counts,
    )
