"""When checkpoints are due: the first rank decides by its clock, and all ranks follow.

The ranks of a sharded network write a checkpoint together, so all of them must begin it after the
same update. The first rank measures the time and announces its decision. To send few messages, it
also announces after how many updates the ranks ask again. A single process asks after every one.
"""

import time

from probmask.masking.distributed import from_first_rank, several_ranks

_MOST_UPDATES = 1000  # between two announcements


class CheckpointSchedule:
    """Checkpoints at least ``seconds`` apart, 0 for one after every update."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = self._asked = time.monotonic()
        self._length = self._left = 1  # updates from the last announcement to the next; still to go

    def is_due(self) -> bool:
        """Return whether a checkpoint is due. All ranks call this after every update."""
        self._left -= 1
        if self._left > 0:
            return False
        now = time.monotonic()
        per_update = (now - self._asked) / self._length
        due = now - self._last >= self._seconds
        remaining = self._seconds - (0 if due else now - self._last)
        # Half of the updates that fit into the remaining time, because their duration varies.
        fitting = remaining / max(2 * per_update, 1e-9)
        updates = int(min(fitting, 2 * self._length, _MOST_UPDATES))
        plan = from_first_rank(2 * (max(1, updates) if several_ranks() else 1) + due)
        self._length = self._left = plan // 2
        self._asked = now
        if plan % 2:
            self._last = now
        return plan % 2 == 1
