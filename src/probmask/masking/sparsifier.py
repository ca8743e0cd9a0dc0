"""The sparsifier: ties a method to a model and to the optimizer that trains it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from probmask.errors import EarlyEndWarning, InputError
from probmask.masking.batchnorm import batches_for_batchnorm, reestimate_batchnorm
from probmask.masking.budgets import many_at_once
from probmask.masking.optimizers import (
    WeightOptimizers,
    checked_optimizers,
    clear_with_zero_grad,
    remove_parameters,
    watch,
)
from probmask.masking.parametrization import parameter_order, register, settle
from probmask.masking.protocol import Context, Histogram, Method, Progress, Trainables
from probmask.masking.sites import Site
from probmask.masking.summary import LayerSummary, Summary


class Sparsifier:
    """A method at work on a model. Made by `attach`; ended by `finalize`."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        sites: Sequence[Site],
        context: Context,
        scaler: GradScaler | None,
    ) -> None:
        self.method = method
        self.sites = tuple(sites)
        self._model = model
        self._context = context
        self._step = 0
        self._draw = 0
        self._finalized = False
        self._parameter_order = parameter_order(model)
        self._masker = method.begin(self.sites, context)
        for site, mask in zip(self.sites, self._masker.masks, strict=True):
            register(site, mask)
        self._trainables: list[Trainables] = self._masker.trainables()
        self._optimizers: tuple[Optimizer, ...] = ()
        self._scaler = scaler
        self._unfollow: list[Callable[[], None]] = []
        watch.add(self)
        # The model keeps the sparsifier alive: its optimizer may be known only at the first step.
        self._masker.masks[0].keep_alive(self)
        self._prepare(0)

    @property
    def now(self) -> Progress:
        """How far the training is."""
        return Progress(self._step, self._context.total_steps, self._context.steps_per_epoch)

    @property
    def phase_ends(self) -> tuple[int, ...]:
        """The updates at which the method's phases end, the last of them that of the training."""
        return self._context.phase_ends

    @property
    def frozen(self) -> bool:
        """Whether the masks are final."""
        return self._masker.frozen

    @property
    def draw_count(self) -> int:
        """The number of masks to draw per update."""
        return self._masker.draws

    def use(self, *optimizers: Optimizer) -> None:
        """Follow these optimizers, which together train the model's weights.

        Extra trainables of the method (the probabilities) are taken out of them if they are in.
        With several, masks are updated when the last of them has stepped.
        """
        optimizers = checked_optimizers("use", optimizers)
        self._release_optimizers()
        self._optimizers = optimizers
        extra = {id(tensor) for tensor in self._extra_parameters()}
        for optimizer in optimizers:
            remove_parameters(optimizer, extra)
            self._unfollow.append(clear_with_zero_grad(optimizer, self._clear_gradients))
        first, last = optimizers[0], optimizers[-1]
        self._unfollow.append(first.register_step_pre_hook(self._before_step).remove)
        self._unfollow.append(last.register_step_post_hook(self._after_step).remove)

    def draws(self) -> Iterator[float]:
        """Yield once per mask to draw for this update the share of the loss that falls to it.

        for share in sparsifier.draws():
            (share * criterion(model(images), labels)).backward()
        """
        for draw in range(self._masker.draws):
            if draw != self._draw:  # also draw 0, after an update that was skipped
                self._prepare(draw)
            yield 1 / self._masker.draws

    def observe(self, loss: Tensor) -> None:
        """Tell the method the loss of this draw; only those that learn from it alone need it."""
        self._masker.observe(loss.detach(), self._draw)

    def penalty(self) -> Tensor | float:
        """The method's own term of the loss (zero for methods that have none)."""
        return self._masker.penalty()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What matters of the masks at this moment."""
        return self._masker.metrics()

    @torch.no_grad()
    def histograms(self) -> dict[str, Histogram]:
        """Distributions that tell how the method is getting on, by name."""
        return self._masker.histograms()

    def summary(self) -> Summary:
        """What would be kept of each layer if training ended now."""
        self._masker.refresh_hard_masks()
        return Summary(
            tuple(
                LayerSummary(site.name, site.shape, int(mask.hard.sum()), site.size)
                for site, mask in zip(self.sites, self._masker.masks, strict=True)
            )
        )

    def finalize(self, data: Iterable[Any] | None = None) -> Summary:
        """Leave a plain ``nn.Module`` with exactly the budget, and say what was kept.

        Weights that are masked out become exactly zero; a layer that has none left is named in a
        `LayerCollapseWarning`. It may be called at any update; one before the budget has fallen
        gets an `EarlyEndWarning`, for what has to go then goes at once. With ``data``, an
        iterable of batches, BatchNorm statistics are estimated anew for the network as it now is.
        """
        if self._finalized:
            raise InputError("finalize(): this sparsifier is finished; attach a new one.")
        batches = None if data is None else batches_for_batchnorm(self._model, data)
        removed = self.metrics().get("expected_sparsity", 1.0)
        self._masker.freeze()
        summary = self.summary()
        self._warn_of_early_end(removed, summary.sparsity)
        self._masker.warn_of_collapse([layer.kept for layer in summary.layers])
        settle(self.sites, self._masker.masks, self._parameter_order)
        self._release_optimizers()
        self._masker.release()
        watch.discard(self)
        self._finalized = True
        if batches is not None:
            reestimate_batchnorm(self._model, batches)
        return summary

    def _warn_of_early_end(self, before: float, after: float) -> None:
        step, total = self._step, self._context.total_steps
        if step < total and many_at_once(1 - before, 1 - after):
            warnings.warn(
                f"finalize() after {step} of {total} updates: {100 * before:.4g} % of the weights "
                f"had been removed, now {100 * after:.4g} % are, the rest at once. Train to the "
                "end, or tell attach the total_steps that you make.",
                EarlyEndWarning,
                stacklevel=3,
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs beside the state of model and optimizers."""
        return {
            "step": self._step,
            "training": self._training(),
            "method": self._masker.state_dict(),
            "trainables": [group.optimizer.state_dict() for group in self._trainables],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; the model's own state is loaded beforehand."""
        if absent := {"step", "training", "method", "trainables"} - set(state):
            raise InputError(
                f"load_state_dict(): has no {', '.join(map(repr, sorted(absent)))}, so it is not a "
                "sparsifier's state, or one of another version of probmask; hand over what "
                "sparsifier.state_dict() gave."
            )
        _check_same(state["training"], self._training())
        self._step = state["step"]
        for group, saved in zip(self._trainables, state["trainables"], strict=True):
            group.optimizer.load_state_dict(saved)
        self._masker.load_state_dict(state["method"])
        self._prepare(0)

    def _training(self) -> dict[str, Any]:
        """What tells a checkpoint of another training from one of this."""
        return {
            "method": self.method.name,
            **self.method.full_settings(),
            "total_steps": self._context.total_steps,
            "steps_per_epoch": self._context.steps_per_epoch,
        }

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        itself, *rest = args
        closure = rest[0] if rest else kwargs.get("closure")
        if closure is None:
            self._on_gradients()
            return None

        def with_gradients() -> Any:
            loss = closure()
            self._on_gradients()
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (itself, with_gradients, *rest[1:]), others

    def _on_gradients(self) -> None:
        if self._draw + 1 != self._masker.draws:
            raise InputError(
                f"{type(self.method).__name__}(draws={self._masker.draws}): this update saw "
                f"{self._draw + 1} of them; wrap forward and backward in "
                "'for share in sparsifier.draws():'."
            )
        if any(getattr(o, "grad_scale", None) is not None for o in self._optimizers):
            raise InputError(
                "scaler.step(optimizer): a fused optimizer unscales gradients within its step, "
                "after masks have looked at them; build it with fused=False."
            )
        with torch.no_grad():
            self._unscale()
            self._masker.after_backward(self.now, WeightOptimizers(self._optimizers))

    def _unscale(self) -> None:
        # The scaler unscales the gradients of its optimizer, which the probabilities are not in.
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        if scale != 1.0:
            for parameter in self._extra_parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(scale)

    @torch.no_grad()
    def _after_step(self, _: Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        now, optimizers = self.now, WeightOptimizers(self._optimizers)
        if not self._masker.frozen:
            self._train_extra(now, optimizers.rate)
        self._clear_gradients()
        self._masker.after_update(now, optimizers)
        self._step += 1
        ended = [phase for phase, end in enumerate(self._context.phase_ends) if end == self._step]
        for phase in ended[:-1] if self._step == self._context.total_steps else ended:
            self._masker.begin_phase(phase + 1, self.now, optimizers)
        self._prepare(0)

    @torch.no_grad()
    def _prepare(self, draw: int) -> None:
        self._draw = draw
        self._masker.before_forward(self.now, draw)

    def _train_extra(self, now: Progress, rate: float) -> None:
        for group in self._trainables:
            for settings in group.optimizer.param_groups:
                settings["lr"] = group.learning_rate(now, rate)
            group.optimizer.step()

    def _extra_parameters(self) -> list[Tensor]:
        return [parameter for mask in self._masker.masks for parameter in mask.parameters()]

    def _clear_gradients(self) -> None:
        for parameter in self._extra_parameters():
            parameter.grad = None

    def _release_optimizers(self) -> None:
        for undo in self._unfollow:
            undo()
        self._unfollow.clear()
        self._optimizers = ()

    def on_any_optimizer(self, optimizer: Optimizer) -> None:
        """Adopt the optimizer that trains our weights, or refuse one that goes past us."""
        if any(optimizer is known for known in self._optimizers):
            return
        if any(optimizer is group.optimizer for group in self._trainables):
            return
        trained = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        extra = {id(parameter) for parameter in self._extra_parameters()}
        if not trained & ({id(site.weight) for site in self.sites} | extra):
            return
        if self._optimizers:
            raise InputError(
                f"{type(optimizer).__name__}.step(): this optimizer trains weights that a "
                "sparsifier masks, but the sparsifier follows another one; "
                "call sparsifier.use(optimizer) with all optimizers of the model."
            )
        self.use(optimizer)


def _check_same(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse a state of another training, and say in what it differs."""
    keys = list(here) if saved["method"] == here["method"] else ["method"]
    different = [
        f"{key} was {saved.get(key)!r} and is {here[key]!r}"
        for key in keys
        if saved.get(key) != here[key]
    ]
    if different:
        raise InputError(
            f"load_state_dict(): a checkpoint of another training: {'; '.join(different)}. Call "
            "attach with the arguments that it was saved with."
        )
