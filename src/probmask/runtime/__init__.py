"""Run sparse networks fast on a CPU, on kernels that Numba compiles for the processor."""

from typing import TYPE_CHECKING, Any

# An eager import: the function has to replace the submodule of the same name.
from probmask.runtime.compile import compile  # noqa: A004

if TYPE_CHECKING:
    from probmask.runtime.run.engine import Engine

__all__ = ["Engine", "compile"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module 'probmask.runtime' has no attribute {name!r}")
    from probmask.runtime.run.engine import Engine  # imports Numba

    return Engine
