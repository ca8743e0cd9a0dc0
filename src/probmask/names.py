"""Looking things up by name; a name that is not there gets the nearest one that is."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from probmask.errors import InputError

T = TypeVar("T")


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is probably meant, if one is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return close[0] if close else None


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name comes closest, or which there are if none is close."""
    known = sorted(known)
    close = closest(name, known)
    return f"there are: {', '.join(known)}." if close is None else f"did you mean {close!r}?"


def lookup(kind: str, argument: str, name: str, known: Mapping[str, T]) -> T:
    """Return what goes by ``name``, or refuse with the nearest known name."""
    if name not in known:
        raise InputError(f"{argument} {name}: no such {kind}; {nearest(name, known)}")
    return known[name]
