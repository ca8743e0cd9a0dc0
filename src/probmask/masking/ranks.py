"""Where this process stands among several that train together."""

from typing import Any

from torch import distributed


def running() -> bool:
    """Whether there are several processes at all."""
    return distributed.is_available() and distributed.is_initialized()


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if running() else 0


def gathered(value: Any) -> list[Any]:
    """What every rank has, on every rank."""
    if not running():
        return [value]
    values: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def from_first_rank(value: int) -> int:
    """The first rank's value, on every rank."""
    values = [value]
    if running():
        distributed.broadcast_object_list(values, src=0)
    return values[0]
