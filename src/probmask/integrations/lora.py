"""Merge LoRA adapters into a pruned model and keep its zeros."""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probmask.errors import InputError, NonFiniteError
from probmask.masking.parametrization import masked_parameters
from probmask.masking.zeros import remember_zeros


@dataclass(frozen=True)
class MergedLayer:
    """What keeping the zeros of one weight discards, with squared Euclidean norms.

    Attributes:
        name: Name of the weight in the merged model.
        kept: Number of nonzero weights before and after the merge.
        size: Number of weights.
        update: Squared norm of the adapter's update of the weight.
        discarded: Squared norm of the part of the update that falls on zeros.
        merged: Squared norm of the weight after a merge without the mask.
    """

    name: str
    kept: int
    size: int
    update: float
    discarded: float
    merged: float

    @property
    def change(self) -> float:
        """Norm of what is discarded, relative to the norm of the merged weight."""
        return math.sqrt(self.discarded / self.merged) if self.merged else 0.0

    @property
    def update_lost(self) -> float:
        """Norm of what is discarded, relative to the norm of the update."""
        return math.sqrt(self.discarded / self.update) if self.update else 0.0


@dataclass(frozen=True)
class MergeCost:
    """What keeping the zeros discards of the adapters' updates, in total and per layer.

    Print it for a table. `total` sums all layers. It says nothing about the accuracy: evaluate the
    merged model.
    """

    layers: tuple[MergedLayer, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{row.name}: {row.kept:,} of {row.size:,} kept, {100 * row.update_lost:.2f} % of the "
            f"update discarded, {100 * row.change:.2f} % of the merged weight"
            for row in (*self.layers, self.total)
        )

    @property
    def total(self) -> MergedLayer:
        """Sums over all layers."""
        rows = self.layers
        return MergedLayer(
            "all",
            kept=sum(row.kept for row in rows),
            size=sum(row.size for row in rows),
            update=math.fsum(row.update for row in rows),
            discarded=math.fsum(row.discarded for row in rows),
            merged=math.fsum(row.merged for row in rows),
        )


def merge_lora(
    model: nn.Module, *, adapter_names: Sequence[str] | None = None
) -> tuple[nn.Module, MergeCost]:
    """Merge the LoRA adapters of a pruned model into its weights, and keep its zeros.

    peft's own ``merge_and_unload`` adds a dense update to each weight, which fills the zeros. Here
    each weight gets the mask of its nonzero entries again after the merge. The part of the update
    that falls on zeros is discarded. Layers without zeros are merged as by peft.

    Args:
        model: What ``peft.get_peft_model`` or ``PeftModel.from_pretrained`` returned. It is merged
            in place; use the returned model from then on.
        adapter_names: The adapters to merge. Default: those that are active.

    Returns:
        The plain model, and what keeping the zeros costs.

    Raises:
        InputError: If the model is not a `PeftModel` or has no such adapter, its masks are not
            finalized, or a weight is quantized.
        NonFiniteError: If a merged weight is NaN or infinite.

    Example:
        >>> import torch
        >>> from peft import LoraConfig, get_peft_model
        >>> base = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> _ = base[0].weight.data.fill_diagonal_(0.0)
        >>> config = LoraConfig(target_modules=["0"], init_lora_weights=False)
        >>> adapted = get_peft_model(base, config)
        >>> merged, cost = probmask.merge_lora(adapted)
        >>> cost.total.kept, merged[0].weight.diagonal().count_nonzero().item()
        (56, 0)
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise InputError(
            f"merge_lora needs {error.name}; run pip install -c constraints.txt 'probmask[peft]'."
        ) from error
    if not isinstance(model, PeftModel):
        raise InputError(
            f"merge_lora({type(model).__name__}): expected a PeftModel, as peft.get_peft_model "
            "returns."
        )
    for path, *_ in masked_parameters(model):
        name = path.removeprefix("base_model.model.").replace(".base_layer.", ".")
        raise InputError(
            f"merge_lora(model): {name} still has a mask; call finalize() on the sparsifier, or on "
            "the result of freeze_masks, first."
        )
    names = _adapter_names(model, adapter_names)
    layers = list(_adapted_layers(model))
    costs = [cost for name, layer in layers for cost in _merge(name, layer, names)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        plain: nn.Module = model.merge_and_unload(adapter_names=names)
    return plain, MergeCost(tuple(costs))


def _adapter_names(model: Any, given: object) -> list[str] | None:
    """Return the adapters to merge as a list, after checking that the model has them."""
    if given is None:
        return None
    known = list(model.peft_config)
    names = [given] if isinstance(given, str) else given
    listed_names = ", ".join(map(repr, known))
    if not isinstance(names, Sequence) or not names or any(name not in known for name in names):
        raise InputError(
            f"merge_lora(adapter_names={given!r}): the adapters of the model are {listed_names}; "
            "pass a list of them, or omit adapter_names to merge those that are active."
        )
    return list(names)


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield each layer with an adapter, by its name in the plain model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer()
            for key, weight in base.named_parameters(recurse=False):
                if not weight.is_floating_point():
                    raise InputError(
                        f"merge_lora(model): {name}.{key} is quantized ({weight.dtype}); load the "
                        "base model in floating point."
                    )
            yield name, module


@torch.no_grad()
def _merge(name: str, layer: Any, adapter_names: list[str] | None) -> list[MergedLayer]:
    """Merge the adapters of one layer, set the zeros of its weights again, return the cost."""
    if layer.merged:  # by peft's merge_adapter(); the zeros come back exactly: (0 + d) - d = 0
        layer.unmerge()
    weights = [(k, w) for k, w in layer.get_base_layer().named_parameters(recurse=False)]
    before = {key: weight.clone() for key, weight in weights}
    layer.merge(adapter_names=adapter_names)
    costs = []
    for key, weight in layer.get_base_layer().named_parameters(recurse=False):
        zeros = before[key] == 0
        if not bool(weight.isfinite().all()):
            raise NonFiniteError(
                f"merge_lora(model): {name}.{key} is NaN or infinite after the merge: the training "
                "of the adapters has diverged. DoRA (use_dora=True) divides by the norm of each "
                "row, and rows whose weights are all pruned have the norm 0; use plain LoRA."
            )
        if weight.dim() < 2:
            continue
        cost = MergedLayer(
            f"{name}.{key}" if name else key,
            kept=int((~zeros).sum()),
            size=weight.numel(),
            update=_squares(weight - before[key]),
            discarded=_squares(weight[zeros]),
            merged=_squares(weight),
        )
        weight.masked_fill_(zeros, 0.0)
        remember_zeros([weight])
        costs.append(cost)
    return costs


def _squares(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
