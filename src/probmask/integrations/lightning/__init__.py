"""Sparse training with Lightning's ``Trainer``: one callback."""

from probmask.errors import InputError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise InputError(
        f"probmask.integrations.lightning needs {error.name}; run pip install -c constraints.txt "
        "'probmask[lightning]'."
    ) from error

from probmask.integrations.lightning.callback import SparsityCallback

__all__ = ["SparsityCallback"]
