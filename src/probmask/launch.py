"""What the launcher and the system give this process: its rank and its cores.

Commands need the rank before they import PyTorch, so it is read from the environment and not
through `torch.distributed`.
"""

import os
import sys


def is_first_rank() -> bool:
    """Return whether this process has rank 0 or runs alone."""
    return launched_rank() == "0"


def launched_rank() -> str:
    """Return the rank set by the launcher, as text; "0" for a process started without one."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))


def ranks_of_torchrun() -> tuple[int, int] | None:
    """Return the number of nodes and of ranks on each, or None if ``torchrun`` is not used."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    return int(os.environ["WORLD_SIZE"]) // here, here


def restarts_of_torchrun() -> tuple[int, int]:
    """Return how often ``torchrun`` has restarted the ranks, and how often it may."""
    return (
        int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
    )


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
