"""What the masks need of the arguments of a training, checked before anything is trained."""

import math
from collections.abc import Sized
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainingArguments

from probmask.errors import InputError


def updates_per_epoch(loader: object, accumulated: int) -> int | None:
    """Return the number of updates per epoch, or None for data without a length."""
    try:
        batches = len(loader) if isinstance(loader, Sized) else 0
    except TypeError:  # an IterableDataset has no length
        return None
    return math.ceil(batches / accumulated) or None


def check_same_length(before: int, here: int) -> None:
    """Raise if a resumed training would make another number of updates."""
    if before != here:
        raise InputError(
            f"train(resume_from_checkpoint=…): the checkpoint is from a training of {before:,} "
            f"updates, and this one makes {here:,}; use the same number of epochs or max_steps, "
            "and the same batch size."
        )


def check_training(
    args: TrainingArguments, model: nn.Module, optimizer: Optimizer, prepared: Any
) -> None:
    """Raise for what the Trainer can do but the masks cannot follow."""
    refused = {
        "deepspeed": (args.deepspeed, "it partitions the weights; use DDP (torchrun)"),
        "fsdp": (args.fsdp, "it partitions the weights; use DDP (torchrun)"),
        "n_gpu": (args.n_gpu > 1, "nn.DataParallel copies the model; start one process per GPU"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "it begins again with another number of updates; set per_device_train_batch_size",
        ),
        "save_only_model": (
            args.save_only_model and args.load_best_model_at_end,
            "load_best_model_at_end needs the masks of the best model; save the optimizer too",
        ),
        "fp16": (
            prepared.scaler is not None and optimizer.defaults.get("fused"),
            "a fused optimizer unscales gradients too late for the masks; set optim='adamw_torch'",
        ),
    }
    for name, (given, reason) in refused.items():
        if given:
            raise InputError(f"SparsityCallback: {name}={getattr(args, name)!r:.80}: {reason}.")
    adapted = type(model).__module__.startswith("peft.") or vars(model).get(
        "_hf_peft_config_loaded", False
    )
    if adapted:
        raise InputError(
            "SparsityCallback: the model has PEFT adapters, which keep its weights fixed; prune "
            "the model first, then train adapters, then call probmask.merge_lora."
        )
