"""Multiply-accumulate operations per weight, counted by running the model once."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.masking.modes import evaluating
from probmask.masking.sites import Site


def macs_per_weight(model: nn.Module, sites: Sequence[Site], example: Any) -> tuple[int, ...]:
    """Count, per site, in how many multiplications each weight takes part for one example.

    The convention is STR's: multiplications of weights only; BatchNorm, activations, pooling and
    biases are free; padding counts as if it were data. ``example`` is a batch for the model: a
    tensor, a sequence of positional or a mapping of keyword arguments; counts are per example of
    it. A module that is called twice counts twice; one that is not called (a head for training
    only) does not count.
    """
    counts = dict.fromkeys((id(site.weight) for site in sites), 0)
    batch = _batch_size(example)
    handles = []
    for site in sites:
        for module, name in site.holders:
            hook = _counting_hook(counts, id(site.weight), module, name)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    # Attention uses the weight of its output projection without calling that module.
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and id(module.out_proj.weight) in counts:
            hook = _counting_hook(counts, id(module.out_proj.weight), module, "out_proj")
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        # Counting leaves no trace in BatchNorm or RNG; fused attention would bypass the hooks.
        with evaluating(model), torch.random.fork_rng(devices=[]), _without_fused_attention():
            _call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(counts[id(site.weight)] // batch for site in sites)


class _without_fused_attention:  # noqa: N801 - reads as a statement
    """Keep ``nn.TransformerEncoderLayer`` from its fused path, which calls no submodule."""

    def __enter__(self) -> None:
        self._enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self._enabled)


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, Mapping):
        model(**example)
    elif isinstance(example, list | tuple):
        model(*example)
    else:
        model(example)


def _batch_size(example: Any) -> int:
    if isinstance(example, Mapping):
        example = list(example.values())
    first = example[0] if isinstance(example, list | tuple) and example else example
    if not isinstance(first, Tensor) or first.dim() == 0 or first.shape[0] == 0:
        raise InputError(
            f"example_inputs={type(example).__name__}: expected a batch that the model takes: a "
            "tensor, a tuple of positional or a dict of keyword arguments, batch dimension first."
        )
    return int(first.shape[0])


def _counting_hook(counts: dict[int, int], key: int, module: nn.Module, name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        counts[key] += _uses(module, name, args, kwargs, output)

    return hook


def _uses(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> int:
    """How often each weight was multiplied in one call of the module."""
    given = list(args) + list(kwargs.values())
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return int(given[0].numel()) // module.in_channels
    if isinstance(module, nn.modules.conv._ConvNd):
        return int(output.numel()) // module.out_channels
    if isinstance(module, nn.Linear | nn.Bilinear):
        return int(output.numel()) // module.out_features
    if isinstance(module, nn.MultiheadAttention):
        tokens = [
            int(tensor.numel()) // int(tensor.shape[-1])
            for position, argument in enumerate(("query", "key", "value"))
            for tensor in [kwargs[argument] if argument in kwargs else args[position]]
        ]
        if name == "in_proj_weight":  # three projections in one tensor: the mean of their uses
            return round(sum(tokens) / 3)
        return tokens[{"k_proj_weight": 1, "v_proj_weight": 2}.get(name, 0)]
    raise InputError(
        f"MACs of {type(module).__name__}.{name} are unknown: its weights are not used in a "
        "convolution, a linear layer or attention; exclude it or budget in parameters."
    )
