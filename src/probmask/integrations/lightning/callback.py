"""The callback: when it attaches, trains, saves and finishes the masks."""

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from probmask.artifact import save
from probmask.errors import EarlyEndWarning, InputError
from probmask.integrations.callback_arguments import check_artifact, check_callback_arguments
from probmask.integrations.lightning.random_replay import RandomReplay, random_state
from probmask.integrations.lightning.trainer_checks import (
    check_data,
    check_not_scaled,
    check_optimizers,
    check_strategy,
)
from probmask.integrations.lightning.training_length import (
    check_same_length,
    remaining_updates,
    updates_per_epoch,
    warn_of_few_updates,
)
from probmask.integrations.resumed_masks import attach_resumed
from probmask.masking.attach import attach
from probmask.masking.distributed import gathered, rank
from probmask.masking.freeze_masks import FrozenMasks, freeze_masks
from probmask.masking.method import Method
from probmask.masking.parametrization import masked_parameters
from probmask.masking.probe import Probe
from probmask.masking.sites import Frozen, name_patterns
from probmask.masking.sparsifier import Sparsifier
from probmask.masking.summary import Summary


class SparsityCallback(Callback):
    """Train the module of a Lightning ``Trainer`` to an exact sparsity.

    The masks are attached when ``fit`` starts and follow all optimizers of the module. When the
    training ends, the module is pruned to exactly the requested sparsity and is a plain module
    again. Checkpoints contain the state of the masks; they load into the plain module too, and
    ``fit(ckpt_path=…)`` resumes bit for bit. A training that is interrupted leaves the masks
    attached, so that nothing is lost.

    Args:
        method: The method, for example ``probmask.TiedProbMask(sparsity=0.9)``.
        data: Batches to re-estimate the BatchNorm statistics from at the end, or ``"train"`` for
            those of the train dataloader.
        artifact: File to save the finished network to, on the first rank.
        overwrite: Replace an existing artifact.
        include: Name patterns of further parameters to mask; see `find_sites`.
        exclude: Name patterns of parameters not to mask.
        frozen: Whether weights that have ``requires_grad=False`` when ``fit`` starts are masked
            ("mask"), or left as they are ("skip").
        total_steps: Number of updates of the training. By default it follows from the ``Trainer``.
        steps_per_epoch: Number of updates per epoch. By default it follows from the ``Trainer``.
        example_inputs: A batch for ``forward``, needed to budget in FLOPs. The default is the
            module's ``example_input_array``.
        probe: Data for methods that measure before they prune (SNIP, GraSP, MLPrune).
        seed: Seed of all noise. By default it is drawn from PyTorch's generator.
        pretrained: State that the weights are pretrained; see `attach`.

    Attributes:
        sparsifier: The sparsifier during the training, otherwise None.
        summary: The number of weights kept, once the network is finished.

    Example::

        callback = SparsityCallback(probmask.TiedProbMask(sparsity=0.9), data="train")
        trainer = Trainer(max_epochs=10, callbacks=[callback])
        trainer.fit(module, loader)
        print(callback.summary)
    """

    def __init__(
        self,
        method: Method,
        *,
        data: Iterable[Any] | Literal["train"] | None = None,
        artifact: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        include: Iterable[str] = (),
        exclude: Iterable[str] = (),
        frozen: Frozen = "mask",
        total_steps: int | None = None,
        steps_per_epoch: int | None = None,
        example_inputs: Any = None,
        probe: Probe | None = None,
        seed: int | None = None,
        pretrained: bool = False,
    ) -> None:
        check_callback_arguments(
            "Lightning", method=method, frozen=frozen, data=data, pretrained=pretrained
        )
        if isinstance(data, str) and data != "train":
            raise InputError(
                f"SparsityCallback(data={data!r}): expected an iterable of batches, or 'train' for "
                "those of the train dataloader."
            )
        self.method = method
        self.data = data
        self.artifact = artifact
        self.overwrite = overwrite
        self.include = name_patterns("include", include)
        self.exclude = name_patterns("exclude", exclude)
        self.frozen = frozen
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.example_inputs = example_inputs
        self.probe = probe
        self.seed = seed
        self.pretrained = pretrained
        self.sparsifier: Sparsifier | None = None
        self.summary: Summary | None = None
        self._fixed_masks: FrozenMasks | None = None  # while a finished network is trained further
        self._module: weakref.ref[LightningModule] | None = None
        self._first_step = 0  # updates that the trainer had made before the masks were attached
        self._max_epochs: int | None = None
        self._checkpoint: dict[str, Any] = {}  # the state to resume from, until it is loaded
        self._replay: RandomReplay | None = None
        self._penalized: int | None = None  # the last update with the penalty in its gradients
        self._epoch_began: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn processes pickle the callback. Masks are attached in each of them.
        transient = {"sparsifier": None, "_fixed_masks": None, "_module": None}
        return {**vars(self), **transient}

    # Start of a training

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the strategy and the artifact, before anything is trained."""
        self._checkpoint, self._replay = {}, None
        if stage != "fit":
            return
        check_strategy(trainer)
        if self.artifact is not None and trainer.is_global_zero:
            check_artifact(self.artifact, overwrite=self.overwrite or self.summary is not None)
        self._max_epochs = trainer.max_epochs
        _move_behind_others(trainer, self)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the state to resume from; in an evaluation, prune the module that was loaded."""
        state = checkpoint["callbacks"].get(self.state_key, {})
        if trainer.state.fn == "fit":
            self._checkpoint = {"first_step": checkpoint["global_step"], **state}
        elif "sparsifier" in state:
            self._prune_loaded(pl_module, state["sparsifier"])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the masks, or those of a finished network again."""
        state, self._checkpoint = self._checkpoint, {}
        check_optimizers(trainer)
        trainer.fit_loop.setup_data()
        check_data(self.data, trainer)
        self._attach_masks(trainer, pl_module, state)
        if state:  # the dataloader was set up before Lightning restores its position
            trainer.fit_loop._combined_loader = None
        if "random" in state and len(state["random"]) == trainer.world_size:
            self._replay = RandomReplay(state["random"][rank()])

    def _attach_masks(
        self, trainer: Trainer, pl_module: LightningModule, state: Mapping[str, Any]
    ) -> None:
        ours = self._module is not None and self._module() is pl_module
        attached = ours and next(masked_parameters(pl_module), None) is not None
        if state.get("finished") or (ours and not attached and "sparsifier" not in state):
            self._attach_frozen(pl_module)
            return
        if attached and self._fixed_masks is not None:
            return
        saved = state.get("sparsifier")
        if not attached:
            self._first_step = state.get("first_step", trainer.global_step)
            self._attach(trainer, pl_module, saved)
        elif saved is not None:
            assert self.sparsifier is not None
            self.sparsifier.load_state_dict(saved)
        assert self.sparsifier is not None
        if self.sparsifier.own_optimizers and len(trainer.optimizers) > 1:
            check_not_scaled(self.method, trainer)
        self.sparsifier.use(*trainer.optimizers)
        _delegate_zero_grad(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue with the random numbers of the interrupted training, in its last epoch."""
        if self._replay is not None:
            self._replay.continue_epoch()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue with the random numbers of the interrupted training, in a new epoch."""
        if self._replay is not None:
            self._replay.begin_epoch(trainer)
        if self.sparsifier is not None and trainer.current_epoch == 0:
            self._epoch_began = self.sparsifier.now.step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """End the replay: the training continues."""
        self._replay = None

    def _attach(
        self, trainer: Trainer, pl_module: LightningModule, saved: Mapping[str, Any] | None
    ) -> None:
        total_steps, steps_per_epoch = self.total_steps, self.steps_per_epoch
        if total_steps is None:
            total_steps = remaining_updates(
                trainer, pl_module, max_epochs=self._max_epochs, made=self._first_step
            )
        if steps_per_epoch is None:
            steps_per_epoch = updates_per_epoch(trainer)
        if saved is not None:
            check_same_length(saved["training"]["total_steps"], total_steps)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        begin = partial(self._attached_to, pl_module, total_steps, steps_per_epoch, scaler)
        self.sparsifier = begin() if saved is None else attach_resumed(pl_module, begin, saved)
        self._module = weakref.ref(pl_module)
        self.summary = None

    def _attached_to(
        self,
        pl_module: LightningModule,
        total_steps: int,
        steps_per_epoch: int | None,
        scaler: GradScaler | None = None,
    ) -> Sparsifier:
        given = self.example_inputs
        return attach(
            pl_module,
            self.method,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            include=self.include,
            exclude=self.exclude,
            frozen=self.frozen,
            example_inputs=pl_module.example_input_array if given is None else given,
            probe=self.probe,
            scaler=scaler,
            seed=self.seed,
            pretrained=self.pretrained,
        )

    def _attach_frozen(self, pl_module: LightningModule) -> None:
        """Keep the zeros of a finished network while it is trained further."""
        self._module, self.sparsifier = weakref.ref(pl_module), None
        rank_zero_info(
            "SparsityCallback: the module is finished, so its zeros stay and the other weights are "
            "trained. A new SparsityCallback would prune it again."
        )
        if self.method.sparsity > 0:
            self._fixed_masks = freeze_masks(
                pl_module, include=self.include, exclude=self.exclude, frozen=self.frozen
            )

    # Training

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Add the gradient of the method's penalty, once per update.

        Here the gradients of the weights are complete: accumulated, averaged over the ranks and
        unscaled, but not clipped yet.
        """
        if self.sparsifier is not None:
            step = self.sparsifier.now.step
            # The method's own parameters belong to the first optimizer that steps.
            first = len(trainer.optimizers) == 1 or step != self._penalized
            _add_penalty_gradient(self.sparsifier, optimizer, trainer, own=first)
            self._penalized = step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Recompute the masks: a callback may have exchanged the weights for averaged ones."""
        _invalidate_masks(pl_module)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log the sparsity every ``log_every_n_steps`` updates."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.sparsifier is not None and every and self.sparsifier.now.step % every == 0:
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the sparsity; warn if the first epoch made fewer updates than planned."""
        self._log(trainer, pl_module)
        began, self._epoch_began = self._epoch_began, None
        if began is not None and self.sparsifier is not None and self.total_steps is None:
            warn_of_few_updates(self.sparsifier, began)

    def _log(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sparsifier is None or trainer.barebones:
            return
        metrics = self.sparsifier.metrics()
        if "expected_sparsity" in metrics:
            sparsity = metrics.pop("expected_sparsity")
            pl_module.log("sparsity", sparsity, prog_bar=True, sync_dist=True)
        pl_module.log_dict({f"sparsity/{name}": v for name, v in metrics.items()}, sync_dist=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the masks for a checkpoint."""
        if self.sparsifier is not None:
            return {
                "sparsifier": self.sparsifier.state_dict(),
                "first_step": self._first_step,
                "random": gathered(random_state()),
            }
        is_finished = self.summary is not None or self._fixed_masks is not None
        return {"finished": True} if is_finished else {}

    # End of a training

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the network, before the last checkpoint is saved."""
        self._finish(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the network if a checkpoint of the last update was resumed."""
        self._finish(trainer, pl_module)

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        masks = self.sparsifier or self._fixed_masks
        if masks is None:
            return
        if self._replay is not None:  # no update was left: the dataloader draws random numbers
            self._replay.continue_epoch()
        _invalidate_masks(pl_module)  # a callback may have copied averaged weights to the module
        data = _train_batches(trainer) if isinstance(self.data, str) else self.data
        with trainer.precision_plugin.forward_context():
            self.summary = masks.finalize(data)
        self.sparsifier = self._fixed_masks = None
        kept, size = self.summary.kept, self.summary.size
        rank_zero_info(
            f"SparsityCallback: {kept:,} of {size:,} weights kept, "
            f"{100 * self.summary.sparsity:.2f} % sparse"
        )
        trial: bool | int = trainer.fast_dev_run  # type: ignore[attr-defined]
        if self.artifact is not None and trainer.is_global_zero and not trial:
            save(pl_module, self.artifact, overwrite=True)

    def _prune_loaded(self, pl_module: LightningModule, state: Mapping[str, Any]) -> None:
        """Prune a module that a checkpoint was loaded into as if training had ended there."""
        if self.sparsifier is not None and next(masked_parameters(pl_module), None) is not None:
            self.sparsifier.load_state_dict(state)
            return
        training = state["training"]
        begin = partial(
            self._attached_to,
            pl_module,
            training["total_steps"],
            training.get("steps_per_epoch"),
        )
        sparsifier = attach_resumed(pl_module, begin, state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EarlyEndWarning)
            sparsifier.finalize()


def _move_behind_others(trainer: Any, callback: Callback) -> None:
    """Let the callback act after all others but the checkpoints.

    At the end of a training, averaging callbacks exchange the weights; the network is finished
    after that, and before the last checkpoint is saved.
    """
    last = {id(each) for each in (callback, *trainer.checkpoint_callbacks)}
    others = [each for each in trainer.callbacks if id(each) not in last]
    trainer.callbacks = [*others, callback, *trainer.checkpoint_callbacks]


def _delegate_zero_grad(module: LightningModule) -> None:
    """Make ``zero_grad()`` of Lightning's wrappers call ``zero_grad()`` of the wrapped optimizer.

    It also discards the gradients of the method's own parameters. In manual optimization, the
    wrappers would run the method of the optimizer's class instead.
    """
    wrappers = module.optimizers()
    for wrapper in wrappers if isinstance(wrappers, list) else [wrappers]:
        vars(wrapper)["zero_grad"] = vars(wrapper)["_optimizer"].zero_grad


def _invalidate_masks(module: LightningModule) -> None:
    for *_, masked in masked_parameters(module):
        masked.invalidate()


def _add_penalty_gradient(
    sparsifier: Sparsifier, optimizer: Optimizer, trainer: Trainer, *, own: bool
) -> None:
    with torch.enable_grad():
        penalty = sparsifier.penalty()
    if not isinstance(penalty, Tensor):
        return
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    scales = dict.fromkeys(_parameters(optimizer), 1.0)
    if own:  # the gradients of these parameters are still scaled
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        scales |= {p: scale for each in sparsifier.own_optimizers for p in _parameters(each)}
    gradients = torch.autograd.grad(penalty, list(scales), allow_unused=True)
    for (parameter, scale), gradient in zip(scales.items(), gradients, strict=True):
        if gradient is not None:
            parameter.grad = scale * gradient + (0.0 if parameter.grad is None else parameter.grad)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _train_batches(trainer: Trainer) -> Iterator[Any]:
    """Yield the batches of the train dataloader as ``training_step`` gets them."""
    loader: Any = trainer.train_dataloader
    for batch in islice(loader, int(trainer.num_training_batches)):
        yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
