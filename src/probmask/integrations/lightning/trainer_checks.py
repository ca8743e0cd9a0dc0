"""What the masks need of a Lightning ``Trainer``, checked before anything is trained."""

import math

from lightning.pytorch import Trainer

from probmask.errors import InputError
from probmask.masking.method import Method

# Strategies that divide a weight among the ranks; the masks need whole weights.
_SHARDED = {"DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy"}


def check_strategy(trainer: Trainer) -> None:
    """Raise InputError if the strategy divides weights among the ranks."""
    names = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if names & _SHARDED:
        raise InputError(
            f"SparsityCallback: {type(trainer.strategy).__name__} divides weights among the "
            "processes, and the masks need whole weights; pass strategy='ddp'."
        )


def check_optimizers(trainer: Trainer) -> None:
    """Raise InputError if the module has no optimizer; Lightning then uses a stand-in."""
    if any(type(optimizer).__name__ == "_MockOptimizer" for optimizer in trainer.optimizers):
        raise InputError(
            "SparsityCallback: configure_optimizers() returns no optimizer, so nothing would be "
            "trained; return the optimizer of the module's parameters."
        )


def check_not_scaled(method: Method, trainer: Trainer) -> None:
    """Raise InputError if the gradients of fp16 are scaled."""
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise InputError(
            f"SparsityCallback({type(method).__name__}): the method trains parameters of its own, "
            "which several optimizers with scaled fp16 gradients do not allow; pass "
            "precision='bf16-mixed', or choose TiedProbMask."
        )


def check_data(data: object, trainer: Trainer) -> None:
    """Raise now, not after the training, if the train dataloader cannot be read at its end."""
    if not isinstance(data, str):
        return
    single = not isinstance(trainer.train_dataloader, list | tuple | dict)
    if not single or trainer.num_training_batches == math.inf:
        raise InputError(
            "SparsityCallback(data='train'): this needs one train dataloader that has a length; "
            "pass a list of batches instead."
        )
