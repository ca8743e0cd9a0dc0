"""The number of updates of a Lightning training, which the schedule of the masks needs."""

import math
import warnings

from lightning.pytorch import LightningModule, Trainer

from probmask.errors import EarlyEndWarning, InputError
from probmask.masking.sparsifier import Sparsifier


def remaining_updates(
    trainer: Trainer, module: LightningModule, *, max_epochs: int | None, made: int
) -> int:
    """Return the number of updates from here to the end of the training.

    Args:
        trainer: The trainer.
        module: Its module.
        max_epochs: Number of epochs that the user asked for. StochasticWeightAveraging may have
            added one that makes no updates.
        made: Number of updates that the trainer has made, summed over the optimizers.

    Raises:
        InputError: If the number does not follow from the trainer, or no updates are left.
    """
    added, trainer.fit_loop.max_epochs = trainer.fit_loop.max_epochs, max_epochs
    try:
        steps = trainer.estimated_stepping_batches
    finally:
        trainer.fit_loop.max_epochs = added
    optimizers = 1 if module.automatic_optimization else len(trainer.optimizers)
    kinds = {type(callback).__name__ for callback in trainer.callbacks}  # type: ignore[attr-defined]
    varies = "GradientAccumulationScheduler" in kinds
    counted = optimizers == 1 or trainer.max_steps == -1  # max_steps counts those of each
    if not 0 < steps < math.inf or varies or not counted:
        raise InputError(
            f"SparsityCallback(total_steps=None): the number of updates does not follow from this "
            f"Trainer (max_epochs={max_epochs}, max_steps={trainer.max_steps}) and its data; pass "
            "it as total_steps=."
        )
    remaining = int(steps) - made // max(1, optimizers)
    if remaining < 1:
        raise InputError(
            f"SparsityCallback: the Trainer has made {made:,} updates and makes no more "
            f"(max_epochs={max_epochs}, max_steps={trainer.max_steps}), so that nothing would be "
            "trained; raise max_epochs, or use a new Trainer."
        )
    return remaining


def updates_per_epoch(trainer: Trainer) -> int | None:
    """Return the number of updates per epoch, or None for data without a length."""
    batches = trainer.num_training_batches
    return None if batches == math.inf else math.ceil(batches / trainer.accumulate_grad_batches)


def check_same_length(before: int, here: int) -> None:
    """Raise InputError if a checkpoint is from a training of another number of updates."""
    if before != here:
        raise InputError(
            f"fit(ckpt_path=…): the checkpoint is from a training of {before:,} updates, and this "
            f"one makes {here:,}. Train for as many epochs as before, or pass "
            f"SparsityCallback(total_steps={before}) to follow the earlier schedule; after its end "
            "the masks stay as they are."
        )


def warn_of_few_updates(sparsifier: Sparsifier, began: int) -> None:
    """Warn after the first epoch if the training will end before the schedule of the masks."""
    now = sparsifier.now
    made = now.step - began
    if now.step < now.total_steps and made < 0.75 * now.steps_per_epoch < now.total_steps:
        expected = round(now.total_steps * made / now.steps_per_epoch)
        warnings.warn(
            f"SparsityCallback: the first epoch made {made:,} updates instead of "
            f"{now.steps_per_epoch:,}. The masks follow a schedule of {now.total_steps:,} updates, "
            f"and the training will end after about {expected:,}. Stop it and pass the number of "
            "updates of the whole training as total_steps=.",
            EarlyEndWarning,
            stacklevel=3,
        )
