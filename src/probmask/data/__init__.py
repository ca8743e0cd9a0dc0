"""The data sets, by the names they have on the command line."""

from collections.abc import Callable

from probmask.data.digits import digits
from probmask.data.source import Batch, DataSource, Shard
from probmask.names import lookup

DATA: dict[str, Callable[[str | None], DataSource]] = {
    "digits": digits,
}


def load_data(name: str, directory: str | None = None) -> DataSource:
    """Load a data set by name, from a directory if it lies in one."""
    return lookup("data set", "--data", name, DATA)(directory)


__all__ = ["DATA", "Batch", "DataSource", "Shard", "load_data"]
