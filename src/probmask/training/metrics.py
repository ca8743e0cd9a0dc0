"""The metrics log: JSON lines for tables and plots, and the same numbers for TensorBoard."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self


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

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write out what is still in memory."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _open_board(directory: Path, step: int) -> Any:
    # TensorBoard takes a second to import, so only a run that logs to it pays for it.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=step)
