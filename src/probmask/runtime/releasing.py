"""What a call runs, one after the other, and which tensors it lets go on the way."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Work:
    """A part of a call: it takes its inputs from the values and puts its outputs there."""

    run: Callable[[dict[str, Any]], None]
    reads: Collection[str]
    # What nothing after it reads: the memory is free for what comes.
    last_read: tuple[str, ...] = ()


def with_releases(works: Sequence[Work], kept: Collection[str]) -> list[Work]:
    """The same work, each told what to let go; what is ``kept`` stays until the end."""
    done, needed = [], set(kept)
    for work in reversed(works):
        last = tuple(sorted(set(work.reads) - needed))
        needed.update(work.reads)
        done.append(replace(work, last_read=last))
    return done[::-1]
