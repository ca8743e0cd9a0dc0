"""Checks of the arguments that both callbacks take, before anything is trained."""

import os
from collections.abc import Iterable

from probmask.checks import check_choice
from probmask.errors import InputError
from probmask.files import writable_target
from probmask.masking.method import Method


def check_callback_arguments(
    trainer: str, *, method: object, frozen: object, data: object, pretrained: object
) -> None:
    """Raise InputError for arguments that no training can use.

    Args:
        trainer: The trainer, for messages: "Lightning" or "Hugging Face".
        method: Must be a method that samples one mask per update, because the trainer computes
            one loss per batch.
        frozen: Must be "mask" or "skip".
        data: Must be batches, or None.
        pretrained: Must be True or False.
    """
    if not isinstance(method, Method):
        raise InputError(
            f"SparsityCallback(method={method!r:.80}): expected a method such as "
            "probmask.TiedProbMask(sparsity=0.9)."
        )
    draws = method.full_settings().get("draws")
    if isinstance(draws, int) and draws > 1:
        raise InputError(
            f"SparsityCallback({type(method).__name__}(draws={draws})): {trainer}'s Trainer "
            f"computes one loss per batch, and this method needs one for each of its {draws} "
            "masks; pass draws=1 if the method allows it, or train in your own loop "
            "(docs/own_loop.md)."
        )
    check_choice("SparsityCallback", "frozen", frozen, ("mask", "skip"))
    check_choice("SparsityCallback", "pretrained", pretrained, (True, False))
    if data is not None and not isinstance(data, Iterable):
        raise InputError(
            f"SparsityCallback(data={data!r:.80}): expected an iterable of batches, such as a "
            "DataLoader."
        )


def check_artifact(path: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Raise InputError if the artifact cannot be written at the end of the training."""
    try:
        writable_target(path, overwrite=overwrite)
    except InputError as error:
        raise InputError(f"SparsityCallback: {error}") from error
