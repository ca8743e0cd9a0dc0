"""Run sparse networks fast on a CPU, on kernels that Numba compiles for the processor."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probmask.runtime.c.c_export import export_c
    from probmask.runtime.compilation import compile  # noqa: A004
    from probmask.runtime.portable.loading import load
    from probmask.runtime.portable.numpy_engine import NumPyEngine
    from probmask.runtime.run.engine import Engine

__all__ = ["Engine", "NumPyEngine", "compile", "export_c", "load"]

# Imported when first used: the engines import Numba, and compiling a model imports PyTorch.
_HOMES = {
    "Engine": "probmask.runtime.run.engine",
    "NumPyEngine": "probmask.runtime.portable.numpy_engine",
    "compile": "probmask.runtime.compilation",
    "export_c": "probmask.runtime.c.c_export",
    "load": "probmask.runtime.portable.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'probmask.runtime' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
