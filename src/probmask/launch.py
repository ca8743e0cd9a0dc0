"""The rank that a launcher such as torchrun gives a process in its environment.

Commands need it before they import PyTorch, so it is read here and not through
`torch.distributed`.
"""

import os


def is_first_rank() -> bool:
    """Return whether this process has rank 0 or runs alone."""
    return launched_rank() == "0"


def launched_rank() -> str:
    """Return the rank set by the launcher, as text; "0" for a process started without one."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
