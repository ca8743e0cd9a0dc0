"""Sparse training with Hugging Face's ``Trainer``: one callback."""

from probmask.errors import InputError

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise InputError(
        f"probmask.integrations.transformers needs {error.name}; run pip install -c "
        "constraints.txt 'probmask[transformers]'."
    ) from error

from probmask.integrations.transformers.default_exclusions import default_exclude
from probmask.integrations.transformers.trainer_callback import ARTIFACT, SparsityCallback

__all__ = ["ARTIFACT", "SparsityCallback", "default_exclude"]
