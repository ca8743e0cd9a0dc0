"""Attaching: everything about model and training that a method is told before it begins."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from probmask.checks import check_count
from probmask.errors import InputError
from probmask.masking.macs import macs_per_weight
from probmask.masking.optimizers import checked_optimizers
from probmask.masking.protocol import Context, Method, Phase, Probe
from probmask.masking.ranks import from_first_rank
from probmask.masking.sites import find_sites
from probmask.masking.sparsifier import Sparsifier


def attach(
    model: nn.Module,
    method: Method,
    *,
    total_steps: int,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    steps_per_epoch: int | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    example_inputs: Any = None,
    phases: Sequence[Phase] | None = None,
    probe: Probe | None = None,
    scaler: GradScaler | None = None,
    seed: int | None = None,
) -> Sparsifier:
    """Put a method to work on a model that is about to be trained for ``total_steps`` updates.

    From here on every ``optimizer.step()`` also updates the masks. The optimizer may be made before
    or after; without ``optimizer`` the first one that steps the model's weights is taken. One set
    of masks is drawn per update, not per forward pass: modules called twice, accumulated gradients
    and recomputed activations all see the same network.

    ``include`` and ``exclude`` are name patterns (see `find_sites`). ``steps_per_epoch`` is needed
    by methods that count in epochs. ``example_inputs`` is a batch for the model, needed to budget
    in FLOPs. ``phases`` are the method's own, in proportion, unless given. ``probe`` gives data to
    methods that look at some before they decide (SNIP, GraSP, MLPrune). ``scaler`` is the
    ``GradScaler`` of an fp16 training. ``seed`` decides all noise; without it one is drawn from
    PyTorch's generator.
    """
    if not isinstance(method, Method):
        raise InputError(
            f"attach(method={method!r}): expected a method, as probmask.ProbMask(sparsity=0.9) is."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError(
            "attach(DistributedDataParallel): DDP would not know the probabilities and ranks would "
            "drift apart; attach to the plain model, then wrap it."
        )
    check_count("attach", "total_steps", total_steps, least=1, meaning="updates planned")
    epochs_known = steps_per_epoch is not None
    if steps_per_epoch is None:
        steps_per_epoch = total_steps
    check_count("attach", "steps_per_epoch", steps_per_epoch, least=1, meaning="updates per epoch")
    optimizers = () if optimizer is None else checked_optimizers("attach", optimizer)
    sites = find_sites(model, include=include, exclude=exclude)

    def count_macs() -> tuple[int, ...]:
        if example_inputs is None:
            raise InputError(
                "attach(example_inputs=None): a budget in FLOPs needs a batch that the model "
                "takes; pass example_inputs=."
            )
        counts = macs_per_weight(model, sites, example_inputs)
        for site, count in zip(sites, counts, strict=True):
            if count == 0:
                raise InputError(
                    f"attach(example_inputs): {site.name} takes part in no multiplication for "
                    "them; exclude it or budget in parameters."
                )
        return counts

    if seed is None:
        # The same on all ranks: a sampled mask depends on it.
        seed = from_first_rank(int(torch.randint(2**62, ()).item()))
    # Without epochs only the proportions of phases matter.
    epochs = max(1, round(total_steps / steps_per_epoch)) if epochs_known else total_steps
    context = Context(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        epochs_known=epochs_known,
        seed=seed,
        macs_per_weight=count_macs,
        model=model,
        phase_ends=_phase_ends(phases or method.phases(epochs), total_steps),
        probe=probe,
    )
    sparsifier = Sparsifier(model, method, sites, context, scaler)
    if optimizers:
        sparsifier.use(*optimizers)
    return sparsifier


def _phase_ends(phases: Sequence[Phase], total_steps: int) -> tuple[int, ...]:
    """The updates at which phases end, in proportion to their epochs."""
    lengths = list(accumulate(phase.epochs for phase in phases))
    return tuple(round(total_steps * length / lengths[-1]) for length in lengths)
