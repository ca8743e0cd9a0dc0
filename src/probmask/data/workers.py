"""How many processes read image files."""

import os
import sys

# More read faster than any GPU trains; and a container may see all cores of a large host.
_MOST = 16


def default_workers(*, devices: int = 1) -> int:
    """One for each core that this process may use, shared among the devices of a machine."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(max(1, cores // devices), _MOST)
