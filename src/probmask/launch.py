"""What launchers tell a process before anything of PyTorch is there."""

import os


def is_first_rank() -> bool:
    """Whether this process is the first of those that train together, or the only one."""
    return rank_named() == "0"


def rank_named() -> str:
    """The rank that a launcher gave this process; "0" without one."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
