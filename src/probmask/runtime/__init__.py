"""Run sparse networks fast on a CPU: kernels compiled by Numba for the machine at hand."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probmask.runtime.engine import Engine, compile  # noqa: A004

__all__ = ["Engine", "compile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'probmask.runtime' has no attribute {name!r}")
    from probmask.runtime import engine  # Numba is imported when it is needed

    return getattr(engine, name)
