"""Limits on the memory of this process."""

import ctypes
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

M_MMAP_THRESHOLD = -3  # of glibc, which gives back larger blocks as soon as they are freed


@contextmanager
def memory_limit(extra: int) -> Iterator[None]:
    """Let the process map at most `extra` further bytes; it then raises MemoryError."""
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


def limit_data(extra: int) -> None:
    """Let the process allocate at most `extra` further bytes from now on.

    Mapped files do not count. The default of glibc would keep freed blocks of several MiB.
    """
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    before = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (before + extra, resource.RLIM_INFINITY))
