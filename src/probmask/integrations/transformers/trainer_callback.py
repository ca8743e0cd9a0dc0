"""The callback: when it attaches, trains, saves and finishes the masks."""

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from probmask.artifact import save
from probmask.errors import EarlyEndWarning, InputError
from probmask.integrations.callback_arguments import check_artifact, check_callback_arguments
from probmask.integrations.resumed_masks import attach_resumed
from probmask.integrations.transformers.default_exclusions import default_exclude
from probmask.integrations.transformers.training_arguments import (
    check_same_length,
    check_training,
    updates_per_epoch,
)
from probmask.masking.attach import attach
from probmask.masking.freeze_masks import FrozenMasks, freeze_masks
from probmask.masking.method import Method
from probmask.masking.optimizers import checked_optimizers
from probmask.masking.parametrization import masked_parameters
from probmask.masking.probe import Probe
from probmask.masking.sites import Frozen, matches, name_patterns
from probmask.masking.sparsifier import Sparsifier
from probmask.masking.summary import Summary
from probmask.messages import listed

ARTIFACT = "probmask.safetensors"
"""Name of the artifact in the output directory. `model.safetensors` is that of transformers."""

_LOG = logging.getLogger("probmask")
# The key of the sparsifier's state in the first parameter group of the optimizer's state. PyTorch
# saves and loads such groups with all of their keys, so the Trainer itself carries the state.
_STATE = "probmask"
_FINISHED = {"finished": True}  # the state while a finished network is trained further
_OPTIMIZER_FILE = "optimizer.pt"  # the Trainer's name of the optimizer's state in a checkpoint


class SparsityCallback(TrainerCallback):  # type: ignore[misc]
    """Train a model to an exact sparsity with ``Trainer(callbacks=[SparsityCallback(method)])``.

    The masks are attached when the training begins. When it ends, the model is pruned to exactly
    the requested sparsity and is a plain model again. The artifact is in ``output_dir``, where
    ``trainer.save_model()`` writes too. A second ``trainer.train()`` keeps the zeros.

    Embeddings, the pooler and the head stay dense unless you pass ``exclude``: all weights outside
    ``model.base_model``, and the modules named ``embeddings`` and ``pooler`` in it. Normalization
    layers are never masked.

    Checkpoints load into the plain model. The state of the masks is part of ``optimizer.pt``, so
    ``trainer.train(resume_from_checkpoint=...)`` continues bit for bit.

    Args:
        method: The method, for example ``probmask.TiedProbMask(sparsity=0.9)``.
        include: Name patterns of further parameters to mask; see `probmask.find_sites`. It takes
            precedence over the default of ``exclude``.
        exclude: Name patterns of parameters not to mask, instead of the default. ``()`` masks the
            head too.
        frozen: Whether weights that have ``requires_grad=False`` when the training begins are
            masked ("mask"), or left as they are ("skip").
        artifact: File name of the artifact in ``output_dir``, or None to write none.
        overwrite: Replace an existing artifact.
        data: Batches to re-estimate BatchNorm statistics from, as keyword arguments of the model.
        probe: Data for methods that measure before they prune; see `probmask.Probe`.
        seed: Seed of all noise. Default: the ``seed`` of the training arguments.
        pretrained: State that the weights are pretrained; see `probmask.attach`.

    Attributes:
        sparsifier: The sparsifier during a training, otherwise None. An interrupted training leaves
            the masks attached: resume from a checkpoint, or call ``sparsifier.finalize()``.
        summary: The number of weights kept, once the network is finished.

    Raises:
        InputError: If the method needs several masks per update, which the Trainer cannot do.

    Example:
        >>> import probmask
        >>> from probmask.integrations.transformers import SparsityCallback
        >>> callback = SparsityCallback(probmask.TiedProbMask(sparsity=0.8))
        >>> callback.method.sparsity
        0.8
    """

    def __init__(
        self,
        method: Method,
        *,
        include: Iterable[str] = (),
        exclude: Iterable[str] | None = None,
        frozen: Frozen = "mask",
        artifact: str | os.PathLike[str] | None = ARTIFACT,
        overwrite: bool = False,
        data: Iterable[Any] | None = None,
        probe: Probe | None = None,
        seed: int | None = None,
        pretrained: bool = False,
    ) -> None:
        check_callback_arguments(
            "Hugging Face", method=method, frozen=frozen, data=data, pretrained=pretrained
        )
        self.method = method
        self.sparsifier: Sparsifier | None = None
        self.summary: Summary | None = None
        self._include = name_patterns("include", include)
        self._exclude = None if exclude is None else name_patterns("exclude", exclude)
        self._frozen: Frozen = frozen
        self._artifact, self._overwrite = artifact, overwrite
        self._data, self._probe, self._seed = data, probe, seed
        self._pretrained = pretrained
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._fixed_masks: FrozenMasks | None = None  # while a finished network is trained further
        self._release: Callable[[], None] = lambda: None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the method, or continue from the checkpoint that the Trainer has loaded.

        Raises:
            InputError: If the training cannot be sparse, or the checkpoint is that of another one.
        """
        model, prepared = kwargs["model"], kwargs["optimizer"]
        (optimizer,) = checked_optimizers("SparsityCallback", prepared)
        check_training(args, model, optimizer, prepared)
        path = self._artifact_path(args, state)
        if path is not None and state.is_world_process_zero:
            check_artifact(path, overwrite=self._overwrite or self.summary is not None)
        saved = optimizer.param_groups[0].pop(_STATE, None)
        if state.global_step > 0 and saved is None:
            raise InputError(
                f"train(resume_from_checkpoint=…): the checkpoint of update {state.global_step:,} "
                "has no state of the masks: it was written without SparsityCallback, or with "
                "save_only_model=True. Load its model with from_pretrained and start a new "
                "training."
            )
        self._begin(model, args, state, kwargs["train_dataloader"], saved)
        if self.sparsifier is not None:
            self.sparsifier.use(prepared)
        self._model, self._optimizer = model, optimizer
        self._release()
        self._release = optimizer.register_state_dict_post_hook(self._with_state).remove

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Add the gradient of the method's penalty, which the loss of the Trainer does not have.

        The gradients are zero at this point. The Trainer adds the gradients of the loss and then
        clips the sum.
        """
        if self.sparsifier is None:
            return
        if not kwargs["model"].training:  # after an evaluation; the Trainer does the same next
            kwargs["model"].train()
        penalty = self.sparsifier.penalty()
        if isinstance(penalty, Tensor):
            scaler = kwargs["optimizer"].scaler
            (penalty if scaler is None else scaler.scale(penalty)).backward()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Discard the gradients of the method's parameters, also if fp16 skipped the update."""
        assert self._optimizer is not None
        self._optimizer.zero_grad()  # the Trainer calls model.zero_grad() only

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the current sparsity with each training loss."""
        logs = kwargs["logs"]
        if self.sparsifier is not None and "loss" in logs:
            sparsity = self.sparsifier.metrics().get("expected_sparsity")
            if sparsity is not None:
                logs["sparsity"] = state.log_history[-1]["sparsity"] = sparsity

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prune the model and save the artifact."""
        masks = self.sparsifier or self._fixed_masks
        assert masks is not None
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        with warnings.catch_warnings():
            if best is not None and self.sparsifier is not None:
                _load_masks(self.sparsifier, best)
                # The best model was evaluated with its final masks: this is the same network.
                warnings.simplefilter("ignore", EarlyEndWarning)
            self.summary = masks.finalize(self._data)
        self._release()
        self.sparsifier = self._fixed_masks = None
        _LOG.info("SparsityCallback: the network is finished.\n%s", self.summary)
        path = self._artifact_path(args, state)
        if path is not None and state.is_world_process_zero:
            metadata = {"method": self.method.name, "method_args": self.method.settings()}
            save(kwargs["model"], path, metadata=metadata, overwrite=True)
            _LOG.info("SparsityCallback: wrote %s", path)

    def _begin(
        self,
        model: nn.Module,
        args: TrainingArguments,
        state: TrainerState,
        loader: object,
        saved: Mapping[str, Any] | None,
    ) -> None:
        """Set the masks: those of a sparse training, or of a finished network."""
        resumed = saved if state.global_step > 0 else None
        ours = self._model is model
        if not ours or next(masked_parameters(model), None) is None:
            self.sparsifier = self._fixed_masks = None
        finished = ours and self.sparsifier is None if resumed is None else resumed == _FINISHED
        if finished:
            if self._fixed_masks is None:
                self._fixed_masks = freeze_masks(
                    model,
                    include=self._include,
                    exclude=self._excluded(model),
                    frozen=self._frozen,
                )
            return
        if resumed is not None:
            check_same_length(resumed["training"]["total_steps"], state.max_steps)
        if self.sparsifier is None:
            begin = partial(self._attach, model, args, state, loader)
            self.sparsifier = begin() if resumed is None else attach_resumed(model, begin, resumed)
        elif resumed is not None:
            self.sparsifier.load_state_dict(resumed)
        else:
            raise InputError(
                "train(): the last training of this model was interrupted; continue it with "
                "trainer.train(resume_from_checkpoint=True), or end it with "
                "callback.sparsifier.finalize()."
            )

    def _attach(
        self, model: nn.Module, args: TrainingArguments, state: TrainerState, loader: object
    ) -> Sparsifier:
        exclude = self._excluded(model)
        sparsifier = attach(
            model,
            self.method,
            total_steps=state.max_steps,
            steps_per_epoch=updates_per_epoch(loader, args.gradient_accumulation_steps),
            include=self._include,
            exclude=exclude,
            frozen=self._frozen,
            probe=self._probe,
            seed=args.seed if self._seed is None else self._seed,
            pretrained=self._pretrained,
        )
        masked = sum(site.size for site in sparsifier.sites)
        dense = listed([name for name in exclude if not name.endswith(".bias")]) or "nothing"
        # What the user has not chosen is shown without any logging configuration.
        by_default = self._exclude is None and exclude and state.is_world_process_zero
        _LOG.log(
            logging.WARNING if by_default else logging.INFO,
            "SparsityCallback: %s weights in %d tensors are masked. Excluded%s: %s.",
            f"{masked:,}",
            len(sparsifier.sites),
            " by default (exclude= replaces this choice)" if by_default else "",
            dense,
        )
        if len(sparsifier.phase_ends) > 1:
            _LOG.warning(
                "SparsityCallback(%s): its phases end after updates %s. The Trainer's learning "
                "rate does not start again there; pass a scheduler that does: "
                "Trainer(optimizers=…).",
                type(self.method).__name__,
                ", ".join(map(str, sparsifier.phase_ends)),
            )
        return sparsifier

    def _excluded(self, model: nn.Module) -> tuple[str, ...]:
        if self._exclude is not None:
            return self._exclude
        return tuple(name for name in default_exclude(model) if not matches(name, self._include))

    def _artifact_path(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        if self._artifact is None or state.is_hyper_param_search:
            return None  # the trials of a search share one output directory
        return Path(args.output_dir, self._artifact)

    def _with_state(self, _: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Add the state of the masks to the optimizer's state, so that both are saved together."""
        ours = _FINISHED if self.sparsifier is None else self.sparsifier.state_dict()
        first, *others = state["param_groups"]
        return {**state, "param_groups": [{**first, _STATE: ours}, *others]}


def _load_masks(sparsifier: Sparsifier, checkpoint: str) -> None:
    """Restore the masks of the best model, whose weights the Trainer has just loaded."""
    path = Path(checkpoint, _OPTIMIZER_FILE)
    state = torch.load(path, map_location="cpu", weights_only=True)
    sparsifier.load_state_dict(state["param_groups"][0][_STATE])
    _LOG.info(
        "SparsityCallback: the best model is that of update %s. Its evaluation used the masks that "
        "it has now.",
        f"{sparsifier.now.step:,}",
    )
