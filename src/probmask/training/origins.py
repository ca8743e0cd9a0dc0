"""Where the settings of a run come from: errors name the file or the flag that is to be mended."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from probmask.data import DATA
from probmask.errors import InputError
from probmask.messages import closest, suggestion
from probmask.methods import METHODS
from probmask.models import MODELS
from probmask.parsing import unknown_key

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


def refuse_unknown_keys(
    table: Mapping[str, Any], *, kind: type[Any], optimizer: type[Any], origins: Origins
) -> None:
    """Refuse a key that no ``kind`` has; for one that belongs into a table, say into which."""
    known = names_of(kind)
    for key in table:
        if key not in known:
            meant = {**_in_tables(table, optimizer), **{name: name for name in known}}
            close = closest(key, meant)
            hint = suggestion(key, known) if close is None else f"did you mean {meant[close]!r}?"
            raise unknown_key(key, hint, origins.of)


def names_of(kind: type[Any]) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in fields(kind)]


def _in_tables(table: Mapping[str, Any], optimizer: type[Any]) -> dict[str, str]:
    """What may be set of the chosen method, network and data, with the table that it goes into."""
    method = table.get("method", {})
    chosen = METHODS.get(str(method.get("name", "probmask") if isinstance(method, Mapping) else ""))
    model, data = MODELS.get(str(table.get("model"))), DATA.get(str(table.get("data", "digits")))
    tables: dict[str, Iterable[str]] = {
        "data_args": () if data is None else names_of(type(data.defaults)),
        "model_args": () if model is None else inspect.signature(model.build).parameters,
        "method": ("name",) if chosen is None else ("name", *names_of(chosen)),
        "optimizer": names_of(optimizer),
    }
    return {name: f"{table}.{name}" for table, names in tables.items() for name in names}
