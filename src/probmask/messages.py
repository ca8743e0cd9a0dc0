"""Text of messages: suggestions for misspelt names, and text from files made safe to print.

Every package uses this, also the commands that must start without PyTorch.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from probmask.errors import InputError, UnknownNameError

T = TypeVar("T")


class NamedTable(dict[str, T]):
    """A dictionary of named things of one ``kind`` whose `KeyError` suggests a known name."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        super().__init__(entries)
        self.kind = kind

    def __missing__(self, name: object) -> T:
        raise UnknownNameError(f"{shown(name)}: no such {self.kind}; {suggestion(str(name), self)}")


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to ``name``, or None if none is similar."""
    similar = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return similar[0] if similar else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return "did you mean …?" with the closest known names, or a list of all known names.

    Several names are suggested if they are equally close.
    """
    known = sorted(known)
    similar = difflib.get_close_matches(name, known, n=4, cutoff=0.6)
    if not similar:
        return f"choose from {', '.join(known)}."
    ratios = {each: difflib.SequenceMatcher(None, each, name).ratio() for each in similar}
    *others, last = sorted(repr(each) for each in similar if ratios[each] == ratios[similar[0]])
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"


def lookup(kind: str, argument: str, name: str, known: Mapping[str, T]) -> T:
    """Return ``known[name]``.

    Raise `InputError` for an unknown name. The message starts with ``argument`` (``--model``),
    calls the value a ``kind`` (``model``) and suggests a known name.
    """
    if name not in known:
        raise InputError(f"{argument} {name}: no such {kind}; {suggestion(name, known)}")
    return known[name]


def one_line(error: BaseException) -> str:
    """Return the message of an exception with all white space, also line breaks, as one space."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    r"""Return the text with non-printable characters escaped as in a Python string (``\n``).

    A file can contain any text. Printed unescaped, it could clear the screen or fake a line.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return at most ``most`` names, separated by commas, and the number of the others."""
    others = [f"{len(names) - most:,} more"] if len(names) > most else []
    return ", ".join([*names[:most], *others])


def shown(value: object, most: int = 80) -> str:
    """Return the `repr` of a value for a message, shortened to at most ``most`` characters.

    Values from files can be lists of millions, or integers that Python refuses to write in full.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deeply
        return f"a very large {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"
