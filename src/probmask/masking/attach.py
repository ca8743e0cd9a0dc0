"""`attach`: connect a method with a model."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from probmask.checks import check_choice, check_count
from probmask.errors import InputError, UnmaskedWeightsWarning
from probmask.masking.distributed import from_first_rank
from probmask.masking.divergence import check_initial_weights
from probmask.masking.macs import macs_per_weight
from probmask.masking.method import Context, Method, Phase
from probmask.masking.optimizers import checked_optimizers, scaler_of
from probmask.masking.probe import Probe
from probmask.masking.sharding import check_not_fsdp1, reshard
from probmask.masking.sites import (
    Frozen,
    Site,
    check_is_module,
    find_unmasked,
    name_patterns,
    select_sites,
    unwrapped,
)
from probmask.masking.sparsifier import Sparsifier, check_sharding
from probmask.messages import listed


def attach(
    model: nn.Module,
    method: Method,
    *,
    total_steps: int,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    steps_per_epoch: int | None = None,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    frozen: Frozen = "mask",
    example_inputs: Any = None,
    phases: Sequence[Phase] | None = None,
    probe: Probe | None = None,
    scaler: GradScaler | None = None,
    seed: int | None = None,
    pretrained: bool = False,
) -> Sparsifier:
    """Attach a method to a model before it is trained.

    From here on every ``optimizer.step()`` also updates the masks. One set of masks is drawn per
    update, not per forward pass: modules that are called twice, accumulated gradients and
    recomputed activations all see the same network. The names in ``model.state_dict()`` and the
    order of ``model.parameters()`` do not change.

    Args:
        model: The model, plain or wrapped by DDP, ``torch.compile`` or ``accelerator.prepare``, or
            sharded by ``torch.distributed.fsdp.fully_shard``.
        method: The method, for example ``probmask.TiedProbMask(sparsity=0.9)``.
        total_steps: Number of updates that the training will make.
        optimizer: The optimizers that train the model. Without it, call ``sparsifier.use(...)``
            before training. If ``fully_shard`` is called after `attach`, build them afterwards.
        steps_per_epoch: Number of updates per epoch, for methods that count in epochs.
        include: Name patterns of further parameters to mask; see `find_sites`.
        exclude: Name patterns of parameters not to mask.
        frozen: Weights with ``requires_grad=False`` never change. "mask" prunes them like the
            others, "skip" leaves them as they are.
        example_inputs: A batch for the model, needed to budget in FLOPs.
        phases: Phases of the training; by default the method's own.
        probe: Data for methods that measure before they prune (SNIP, GraSP, MLPrune).
        scaler: The ``GradScaler`` of an fp16 training. Accelerate's optimizers have their own.
        seed: Seed of all noise. By default it is drawn from PyTorch's generator.
        pretrained: State that the weights are pretrained. Methods that discard random initial
            values then keep them. By default, the method examines the normalization layers.

    Returns:
        The sparsifier. Call its ``finalize()`` after training.

    Raises:
        InputError: If an argument is wrong or nothing in the model can be masked. The model is
            then unchanged.

    Warns:
        UnmaskedWeightsWarning: If matrices of the model are neither masked nor excluded.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> method = probmask.TiedProbMask(sparsity=0.75)
        >>> sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=100)
        >>> list(sparsifier.masks)
        ['0.weight']
    """
    _check_arguments(model, method, phases, probe, scaler, seed, pretrained)
    model = unwrapped(model)
    check_count("attach", "total_steps", total_steps, least=1, meaning="a number of updates")
    epochs_known = steps_per_epoch is not None
    if steps_per_epoch is None:
        steps_per_epoch = total_steps
    check_count(
        "attach", "steps_per_epoch", steps_per_epoch, least=1, meaning="a number of updates"
    )
    optimizers = () if optimizer is None else checked_optimizers("attach", optimizer)
    if scaler is None:
        scaler = scaler_of(optimizer)
    exclude = name_patterns("exclude", exclude)  # read twice, so that an iterator would not do
    check_not_fsdp1("attach", model)
    reshard(model)
    sites = select_sites("attach", model, include, exclude, frozen)
    check_sharding("attach", model, method, sites)
    _check_on_a_device(sites)
    check_initial_weights(sites)

    def count_macs() -> tuple[int, ...]:
        if example_inputs is None:
            raise InputError(
                "attach(example_inputs=None): a budget in FLOPs needs a batch for the model; pass "
                "example_inputs=."
            )
        counts = macs_per_weight(model, sites, example_inputs)
        for site, count in zip(sites, counts, strict=True):
            if count == 0:
                raise InputError(
                    f"attach(example_inputs): {site.name} is not used in any multiplication; "
                    "exclude it or budget in parameters."
                )
        return counts

    if seed is None:
        # All ranks must have the same seed, because sampled masks depend on it.
        seed = from_first_rank(int(torch.randint(2**62, ()).item()))
    # Without epochs, only the proportions of the phases matter.
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
        pretrained=pretrained,
    )
    sparsifier = Sparsifier(model, method, sites, context, scaler)
    if optimizers:
        sparsifier.use(*optimizers)
    _warn_of_unmasked(model, sites, exclude, frozen)
    return sparsifier


def _check_arguments(
    model: object,
    method: object,
    phases: Sequence[object] | None,
    probe: object,
    scaler: object,
    seed: object,
    pretrained: object,
) -> None:
    if not isinstance(method, Method):
        given = type(method).__name__ if isinstance(method, nn.Module) else repr(method)
        raise InputError(
            f"attach(method={given}): expected a method such as "
            "probmask.TiedProbMask(sparsity=0.9), after the model."
        )
    check_is_module("attach", model)
    if probe is not None and not isinstance(probe, Probe):
        raise InputError(
            f"attach(probe={type(probe).__name__}): expected a probe; pass "
            "probe=probmask.Probe(batches), with pairs of inputs and targets."
        )
    if not all(isinstance(phase, Phase) for phase in phases or ()):
        raise InputError(f"attach(phases={phases!r}): expected a list of probmask.Phase.")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise InputError(
            f"attach(scaler={type(scaler).__name__}): expected a torch.amp.GradScaler."
        )
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise InputError(f"attach(seed={seed!r}): must be an integer.")
    check_choice("attach", "pretrained", pretrained, (True, False))


def _check_on_a_device(sites: Sequence[Site]) -> None:
    for site in sites:
        if site.weight.is_meta:
            raise InputError(
                f"attach(model): {site.name} is on the meta device and has no values; call "
                "model.to_empty(device=...) and initialize or load the weights first."
            )


def _warn_of_unmasked(
    model: nn.Module, sites: Sequence[Site], exclude: Iterable[str], frozen: Frozen
) -> None:
    """Name the matrices that are not masked, unless the user has excluded or skipped them."""
    matrices = [
        (name, weight)
        for name, weight in find_unmasked(model, sites, exclude=exclude)
        if sum(side > 1 for side in weight.shape) > 1 and (frozen == "mask" or weight.requires_grad)
    ]
    if matrices:
        names = listed([f"{name} ({weight.numel():,})" for name, weight in matrices])
        total = sum(weight.numel() for _, weight in matrices)
        masked = sum(site.size for site in sites)
        warnings.warn(
            f"attach(model): {total:,} weights will not be masked: {names}. The "
            f"sparsity is that of the other {masked:,} weights. Pass include= to mask them too, or "
            "exclude= to omit this warning (command line: --set exclude=…).",
            UnmaskedWeightsWarning,
            stacklevel=3,
        )


def _phase_ends(phases: Sequence[Phase], total_steps: int) -> tuple[int, ...]:
    """Return the updates at which phases end, in proportion to their epochs."""
    lengths = list(accumulate(phase.epochs for phase in phases))
    return tuple(round(total_steps * length / lengths[-1]) for length in lengths)
