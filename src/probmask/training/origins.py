"""Where the settings of a run come from: errors name the file or the flag that is to be mended."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from probmask.errors import InputError

_COMMAND_LINE = "the command line"
# The flags of `probmask train` that take a name.
_FLAGS = {"data": "--data", "model": "--model", "method.name": "--method"}


@dataclass(frozen=True)
class Origins:
    """A file or a command, and the keys that were set over what it says.

    Without a ``source`` all of them were set on the command line. ``flagged`` says whether those
    that take a name have flags of their own there, or go by ``--set``.
    """

    source: str | None = None
    over: frozenset[str] = frozenset()
    flagged: bool = True

    def of(self, key: str) -> str:
        """Where the value of a key is from."""
        return _COMMAND_LINE if self._in_file(key) is None else str(self.source)

    def naming(self, key: str) -> str:
        """What stands before a name that is not known."""
        file = self._in_file(key)
        if file is not None:
            return f"{file}: {key} ="
        return _FLAGS[key] if self.flagged else f"--set {key} ="

    @contextmanager
    def told(self, *keys: str) -> Iterator[None]:
        """Put the file before an error about these keys, if all of them are from there.

        Not before one that begins with a place already.
        """
        try:
            yield
        except InputError as error:
            elsewhere = any(key.partition(".")[0] in keys for key in self.over)
            places = ("--", f"{_COMMAND_LINE}: ", f"{self.source}: ")
            if self.source is None or elsewhere or str(error).startswith(places):
                raise
            raise InputError(f"{self.source}: {error}") from error

    def _in_file(self, key: str) -> str | None:
        """The source, unless the key or a table that it is in was set over it."""
        above = any(key == other or key.startswith(f"{other}.") for other in self.over)
        return None if above else self.source


# Of configurations that are right already.
CHECKED = Origins()
