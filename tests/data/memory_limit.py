"""A limit on the memory of this process, for files that unpack to far more than their size."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let the process allocate at most `extra` further bytes; it then raises MemoryError."""
    if sys.platform != "linux":
        pytest.skip("the limit and the size of the process are those of Linux")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + extra
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
