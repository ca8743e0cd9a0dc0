"""The sparsifier: connects a method with a model and with the optimizers that train it."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from probmask.errors import EarlyEndWarning, InputError
from probmask.masking import agreement
from probmask.masking.batchnorm import batches_for_batchnorm, reestimate_batchnorm
from probmask.masking.distributed import average_gradients_, several_ranks
from probmask.masking.divergence import check_network, check_statistics
from probmask.masking.followed_optimizers import FollowedOptimizers
from probmask.masking.masker import Histogram, Masker, Progress, Trainables
from probmask.masking.method import Context, Method, is_abrupt
from probmask.masking.optimizers import (
    WeightOptimizers,
    checked_optimizers,
    warn_if_refilled,
)
from probmask.masking.parametrization import (
    apply_masks_,
    map_tensors,
    mask_site,
    masked_parameters,
    unmask_site,
)
from probmask.masking.saved_state import ReinitializedWeights, check_saved_state
from probmask.masking.sharding import (
    ShardedWeights,
    check_not_fsdp1,
    check_shards,
    is_dtensor,
    replicas_of,
    reshard,
    rows_of,
    whole_like,
)
from probmask.masking.sites import Site, is_masked
from probmask.masking.summary import Summary, summarize


class Sparsifier:
    """A method attached to a model. `attach` builds it; `finalize` ends it.

    The optimizers that it follows call it at each update. `_act_on_gradients` calls the method's
    ``after_backward``. `_end_update` trains the method's own parameters, calls its ``after_update``
    and prepares the next forward pass by ``before_forward``.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        sites: Sequence[Site],
        context: Context,
        scaler: GradScaler | None,
    ) -> None:
        self.method = method
        self._model = model
        self._context = context
        self._step = 0
        self._draw = 0
        self._finalized = False
        self._followed = self._follow(())
        self._scaler = scaler
        self._updating = False
        self._penalty_requested = False
        self._seen_version: int | None = None
        self._begin(tuple(sites))

    def _begin(self, sites: tuple[Site, ...]) -> None:
        """Attach the method to these sites."""
        self.sites = sites
        self._reinitialized = ReinitializedWeights([site.weight for site in sites])
        self._masker = self.method.begin(sites, self._context)
        self._reinitialized.have_begun()
        _check_gradients(sites, self._masker)
        if self._masker.keep == self._masker.size:
            self._masker.keep_everything()
        for site, masked in zip(self.sites, self._masker.masked, strict=True):
            mask_site(site, masked)
        self._sharded = ShardedWeights.of(self._model, [s.weight for s in sites], self._masker)
        self._trainables: list[Trainables] = self._masker.trainables()
        self._unwatch = self._watch_gradients()
        self._prepare(0)

    def _begin_on_shards(self) -> None:
        """Attach the method again if ``fully_shard`` has replaced the weights since `attach`."""
        check_not_fsdp1("use", self._model)
        reshard(self._model)
        sites = tuple(site.current() for site in self.sites)
        if self._sharded is not None or not any(is_dtensor(site.weight) for site in sites):
            return
        check_sharding("use", self._model, self.method, sites)
        self._unwatch()
        self._masker.release()
        self._begin(sites)

    def __repr__(self) -> str:
        return (
            f"Sparsifier({self.method!r}, {len(self.sites)} sites, update {self._step:,} of "
            f"{self._context.total_steps:,})"
        )

    @property
    def now(self) -> Progress:
        """Position in the training."""
        return Progress(self._step, self._context.total_steps, self._context.steps_per_epoch)

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """The updates at which the method's phases end; the last is the end of the training."""
        return self._context.phase_ends

    @property
    def frozen(self) -> bool:
        """Whether the masks are final."""
        return self._masker.frozen

    @property
    def own_optimizers(self) -> tuple[Optimizer, ...]:
        """Optimizers of the parameters that the method trains in addition to the weights."""
        return tuple(group.optimizer for group in self._trainables)

    @property
    def own_parameters(self) -> list[Tensor]:
        """The parameters that the method trains; if FSDP2 shards the weights, those of its rows."""
        return [parameter for masked in self._masker.masked for parameter in masked.parameters()]

    @property
    def draw_count(self) -> int:
        """Number of masks to draw per update."""
        return self._masker.draws

    @property
    def masks(self) -> dict[str, Tensor]:
        """Boolean mask of each site by parameter name, True where a weight is kept.

        These are the masks that the network would have if training ended now. If FSDP2 shards the
        weights, the masks are sharded alike; ``full_tensor()`` gathers one.
        """
        self._masker.refresh_masks()
        pairs = zip(self.sites, self._masker.masked, strict=True)
        return {site.name: whole_like(masked.mask.clone(), site.weight) for site, masked in pairs}

    def use(self, *optimizers: Optimizer) -> None:
        """Follow these optimizers, which together train the model's weights.

        With several optimizers, the masks are updated when all of them have stepped, in any order.

        Raises:
            InputError: If one of them is not a ``torch.optim.Optimizer``, or after `finalize`.
        """
        self._check_not_finalized("use")
        optimizers = checked_optimizers("use", optimizers)
        self._followed.release()
        if self._step == 0:
            self._begin_on_shards()
        self._followed = self._follow(optimizers)

    def _follow(self, optimizers: Sequence[Optimizer]) -> FollowedOptimizers:
        return FollowedOptimizers(
            optimizers,
            begin=self._begin_update,
            act_on_gradients=self._act_on_gradients,
            end=self._end_update,
            clear=self._discard_gradients,
        )

    def draws(self) -> Iterator[float]:
        """Draw the masks of this update one by one; yield the factor on the loss of each.

        Example:
            for share in sparsifier.draws():
                (share * criterion(model(images), labels)).backward()
        """
        for draw in range(self._masker.draws):
            if draw != self._draw:  # draw 0 too, after a skipped update
                self._prepare(draw)
            yield 1 / self._masker.draws

    def observe(self, loss: Tensor) -> None:
        """Pass the loss of this draw to the method. Only methods that learn from it need it."""
        self._masker.observe(loss.detach(), self._draw)

    def penalty(self) -> Tensor | float:
        """Return the method's own term of the loss, 0.0 for methods without one."""
        self._penalty_requested = True
        return self._masker.penalty()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return numbers that describe the current masks."""
        with self._diagnosing():
            return self._masker.metrics()

    @torch.no_grad()
    def histograms(self) -> dict[str, Histogram]:
        """Return distributions that show the method's progress, by name."""
        with self._diagnosing():
            return self._masker.histograms()

    def summary(self) -> Summary:
        """Return the number of weights that each layer would keep if training ended now."""
        self._masker.refresh_masks()
        kept = self._masker.shards.counts([masked.mask for masked in self._masker.masked])
        return summarize(self._model, self.sites, kept)

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Prune the model to exactly the requested sparsity and leave a plain ``nn.Module``.

        Pruned weights become exactly zero. It may be called after any update.

        Args:
            data: Batches to re-estimate the BatchNorm statistics from: tensors, sequences whose
                first element is the input, or mappings of keyword arguments. Each rank of a
                distributed training passes its own part; all ranks get the average over all parts.

        Returns:
            The number of weights kept, in total and per layer.

        Raises:
            InputError: If it was called before, or ``data`` is needed but empty.
            NonFiniteError: If a kept weight, another trained parameter or a BatchNorm statistic is
                NaN or infinite. Load an earlier state, or pass ``data``, and call it again.

        Warns:
            EarlyEndWarning: If training ended while the budget was still falling, so that many
                weights are pruned in one step.
            LayerCollapseWarning: For each layer that keeps no weight.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(10, 10)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> method = probmask.TiedProbMask(sparsity=0.9)
            >>> sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=20)
            >>> for _ in range(20):
            ...     model(torch.randn(4, 10)).square().sum().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> sparsifier.finalize().kept
            10
        """
        self._check_not_finalized("finalize")
        self._reinitialized.check_loaded()
        if self._sharded is not None:
            self._sharded.refresh()
        batches = None if data is None else batches_for_batchnorm(self._model, data, shared=True)
        pruned = self.metrics().get("expected_sparsity", 1.0)
        with self._diagnosing():
            self._masker.freeze()
        masker = self._masker
        check_network(self._model, masker.names, masker.weights, masker.masked, masker.shards)
        summary = self.summary()
        self._warn_of_early_end(pruned, summary.sparsity)
        self._masker.warn_of_collapse([layer.kept for layer in summary.layers])
        if batches is not None:  # before the masks are removed, so that a failure can be repaired
            in_step = self._sharded is not None
            reestimate_batchnorm(self._model, batches, shared=True, in_step=in_step)
        check_statistics(self._model)
        if self._sharded is not None:
            self._sharded.remove()
        apply_masks_(self.sites, self._masker.masked)
        warn_if_refilled(self._followed.optimizers, self._masker.weights, self._is_masked)
        self._release()
        return summary

    def discard(self) -> None:
        """Remove the masks and all hooks without pruning: the weights stay as they are.

        Raises:
            InputError: If `finalize` or this was called before.
        """
        self._check_not_finalized("discard")
        if self._sharded is not None:
            self._sharded.remove()
        for site in self.sites:
            unmask_site(site)
        self._release()

    def _release(self) -> None:
        self._followed.release()
        self._unwatch()
        self._masker.release()
        self._finalized = True

    def _check_not_finalized(self, caller: str) -> None:
        if self._finalized:
            raise InputError(f"{caller}(): this sparsifier is already finalized; attach a new one.")

    def _is_masked(self) -> bool:
        return any(is_masked(module, name) for site in self.sites for module, name in site.holders)

    def _warn_of_early_end(self, before: float, after: float) -> None:
        step, total = self._step, self._context.total_steps
        if step < total and is_abrupt(1 - before, 1 - after):
            warnings.warn(
                f"finalize() was called after {step:,} of {total:,} steps: the sparsity rises from "
                f"{100 * before:.4g} % to {100 * after:.4g} % at once. Train to the end, or pass "
                "the real number of steps as total_steps.",
                EarlyEndWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a bit-exact resume needs besides model and optimizer states.

        It has the method's state and parameters, which the model's ``state_dict`` does not have.
        """
        return {
            "step": self._step,
            "training": self._training(),
            "shapes": self._shapes(),
            "method": self._masker.state_dict(),
            "trainables": [self._optimizer_state(group.optimizer) for group in self._trainables],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before or after the model's own state.

        Raises:
            InputError: If it is not a sparsifier's state, or the state of another training.
        """
        self._check_not_finalized("load_state_dict")
        check_saved_state(state, self._training(), self._shapes())
        self._step = state["step"]
        self._reinitialized.have_state(self._step)
        self._seen_version = None  # the weights may be loaded next
        for group, saved in zip(self._trainables, state["trainables"], strict=True):
            group.optimizer.load_state_dict(map_tensors(saved, rows_of))
        self._masker.load_state_dict(state["method"])
        self._prepare(0)

    def load_distributed(self, path: str | os.PathLike[str], *, key: str = "sparsifier") -> None:
        """Restore a state that ``torch.distributed.checkpoint`` has saved on any number of ranks.

        Save it on all ranks by ``torch.distributed.checkpoint.save({"sparsifier":
        sparsifier.state_dict(), …}, checkpoint_id=path)``. All ranks call this together; the
        weights may be sharded over another number of ranks, or not at all.

        Args:
            path: The directory of the checkpoint.
            key: The key under which the state was saved.

        Raises:
            InputError: If the directory has no such state, or it is that of another training.
        """
        from probmask.masking.sharded_checkpoint import read_state  # takes a second to import

        self._check_not_finalized("load_distributed")
        self.load_state_dict(read_state(path, key, [site.weight for site in self.sites]))

    def _optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of a method's own optimizer, sharded like the weights."""
        state = optimizer.state_dict()
        if self._sharded is None:
            return state
        weights = {
            id(parameter): site.weight
            for site, masked in zip(self.sites, self._masker.masked, strict=True)
            for parameter in masked.parameters()
        }
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entry in state["state"].items():
            whole = partial(whole_like, weight=weights[id(parameters[index])])
            state["state"][index] = map_tensors(dict(entry), whole)
        return state

    def copy_masks_to(self, model: nn.Module) -> None:
        """Copy the current masks and the method's state to a deep copy of the attached model.

        A deep copy is independent: an averaged model (EMA, SWA) receives new weights at every
        update, but not the new state of the method. Call this before evaluating the copy.

        Raises:
            InputError: If ``model`` is not a deep copy of the attached model.
        """
        sources = {id(masked.source): masked.source for *_, masked in masked_parameters(model)}
        maskers = [source for source in sources.values() if isinstance(source, Masker)]
        if [masker.names for masker in maskers] != [self._masker.names]:
            raise InputError(
                "copy_masks_to(model): not a deep copy of the attached model; copy the model "
                "after attach."
            )
        maskers[0].load_state_dict(self._masker.state_dict())

    def _training(self) -> dict[str, Any]:
        """Return the settings that identify this training, for checkpoints."""
        context = self._context
        epochs = {"steps_per_epoch": context.steps_per_epoch} if context.epochs_known else {}
        return {
            "method": self.method.name,
            **self.method.full_settings(),
            "total_steps": context.total_steps,
            **epochs,
        }

    def _shapes(self) -> dict[str, list[int]]:
        return {site.name: list(site.shape) for site in self.sites}

    def _begin_update(self) -> None:
        if self._step == 0:
            self._check_trained()
        self._reinitialized.check_loaded()
        self._updating = True

    def _check_trained(self) -> None:
        """Raise if the optimizers hold no parameter of the model, such as those of a copy."""
        ours = {id(parameter) for parameter in self._model.parameters()}
        held = [id(p) for p in WeightOptimizers(self._followed.optimizers).parameters]
        if not any(key in ours for key in held):
            raise InputError(
                "optimizer.step(): the optimizer that the sparsifier follows holds no parameter of "
                "the attached model; build it from model.parameters() of this model, after "
                "fully_shard."
            )
        if self._sharded is not None and not all(key in ours for key in held):
            raise InputError(
                "optimizer.step(): the optimizer holds parameters that FSDP2 had gathered when it "
                "was built; call model.reshard() before you build it."
            )

    def _act_on_gradients(self) -> None:
        if self._draw + 1 != self._masker.draws:
            raise InputError(
                f"{type(self.method).__name__}(draws={self._masker.draws}): this update used "
                f"{self._draw + 1} of them; run forward and backward passes inside "
                "'for share in sparsifier.draws():'."
            )
        if any(getattr(o, "grad_scale", None) is not None for o in self._followed.optimizers):
            raise InputError(
                "scaler.step(optimizer): a fused optimizer unscales gradients inside its step, "
                "after the masks have used them; build it with fused=False."
            )
        if not self._penalty_requested and isinstance(self._masker.penalty(), Tensor):
            raise InputError(
                f"{type(self.method).__name__}: the loss of this update lacks the method's "
                "penalty; train with loss + sparsifier.penalty()."
            )
        with torch.no_grad(), self._diagnosing():
            self._unscale()
            self._combine_gradients()
            self._masker.after_backward(self.now, WeightOptimizers(self._followed.optimizers))

    def _combine_gradients(self) -> None:
        """Give all ranks the same gradients of the method's own parameters."""
        if self._sharded is None:
            average_gradients_(self.own_parameters)
        else:
            self._sharded.share_gradients()
            self._sharded.sum_gradients_()

    def _unscale(self) -> None:
        # The scaler unscales the gradients of the user's optimizer only.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if scale != 1.0:
            for parameter in self.own_parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)

    @torch.no_grad()
    def _end_update(self) -> None:
        now, optimizers = self.now, WeightOptimizers(self._followed.optimizers)
        if self._sharded is not None:
            self._sharded.weights_changed()
        if not self._masker.frozen:
            self._train_own_parameters(now, optimizers.rate)
        self._clear_gradients()
        with self._diagnosing():
            self._masker.after_update(now, optimizers)
        self._step += 1
        ended = [phase for phase, end in enumerate(self._context.phase_ends) if end == self._step]
        for phase in ended[:-1] if self._step == self._context.total_steps else ended:
            with self._diagnosing():
                self._masker.begin_phase(phase + 1, self.now, optimizers)
        self._updating = self._penalty_requested = False
        self._seen_version = None
        if self._sharded is not None:
            self._sharded.discard_gradients()
        self._check_ranks()
        self._prepare(0)

    def _check_ranks(self) -> None:
        """Compare the ranks that have the same weights, from time to time."""
        group = None if self._sharded is None else replicas_of(self.sites[0].weight)
        alone = group is None if self._sharded is not None else not several_ranks()
        if alone or not agreement.is_due(self._step):
            return
        masker = self._masker
        tensors = [
            [weight, each.mask if each.frozen else None, *each.parameters(), *each.saved_values()]
            for weight, each in zip(masker.weights, masker.masked, strict=True)
        ]
        agreement.check_agreement(self._step, masker.names, tensors, group)

    @torch.no_grad()
    def _prepare(self, draw: int) -> None:
        self._draw = draw
        with self._diagnosing():
            self._masker.prepare(self.now, draw)
        if self._sharded is not None:
            self._sharded.refresh()

    def _diagnosing(self) -> AbstractContextManager[None]:
        return self._masker.diagnosing(f"after {self._step:,} updates")

    def _train_own_parameters(self, now: Progress, rate: float) -> None:
        for group in self._trainables:
            for settings in group.optimizer.param_groups:
                settings["lr"] = group.learning_rate(now, rate)
            group.optimizer.step()

    def _discard_gradients(self) -> None:
        """Discard the gradients of the method's own parameters, because of ``zero_grad``."""
        if self._followed.some_have_stepped and self._trainables and self._scaler is None:
            raise InputError(
                f"{type(self.method).__name__}: optimizer.zero_grad() was called after one of the "
                "optimizers has stepped and before all of them have. The method also trains "
                "parameters of its own, whose gradients would be lost; compute all gradients, then "
                "step all optimizers, then call zero_grad(). Or choose a method without parameters "
                "of its own, such as TiedProbMask."
            )
        self._clear_gradients()
        if self._sharded is not None:
            self._sharded.discard_gradients()

    def _clear_gradients(self) -> None:
        for parameter in self.own_parameters:
            parameter.grad = None

    def _watch_gradients(self) -> Callable[[], None]:
        """Detect updates of the weights by an optimizer that the sparsifier does not follow."""
        for site in self.sites:
            if site.weight.requires_grad:
                hook = site.weight.register_post_accumulate_grad_hook(self._check_followed)  # type: ignore[no-untyped-call]
                return lambda: hook.remove()
        return lambda: None

    def _check_followed(self, weight: Tensor) -> None:
        """Raise if the weight has changed since its last gradient without a step seen here."""
        if self._updating:  # an optimizer with a closure moves weights between gradients
            return
        version = weight._version + rows_of(weight)._version
        if self._seen_version not in (None, version):
            followed = "another optimizer" if self._followed.optimizers else "no optimizer"
            raise InputError(
                f"The weights are being trained, but the sparsifier follows {followed}; call "
                "sparsifier.use(optimizer) with the optimizers that train them."
            )
        self._seen_version = version


def check_sharding(caller: str, model: nn.Module, method: Method, sites: Sequence[Site]) -> None:
    """Raise an `InputError` unless the method can train the weights as they are divided."""
    check_shards(caller, model, [(site.name, site.weight) for site in sites])
    if is_dtensor(sites[0].weight) and (reason := method.refuses_shards()):
        raise InputError(
            f"{caller}(method={type(method).__name__}): it cannot train weights that fully_shard "
            f"has divided: {reason}. Train with DDP, or use TiedProbMask with its default settings."
        )


def _check_gradients(sites: Sequence[Site], masker: Masker) -> None:
    """Raise if FSDP2 would compute no gradient for the method's parameters of a site."""
    for site, masked in zip(sites, masker.masked, strict=True):
        untrained = is_dtensor(site.weight) and not site.weight.requires_grad
        if untrained and any(True for _ in masked.parameters()):
            raise InputError(
                f"attach(model): {site.name} has requires_grad=False and is sharded; FSDP2 then "
                "computes no gradient for the parameters that the method trains. Pass "
                "frozen='skip', or choose a method without own parameters, such as TiedProbMask."
            )
