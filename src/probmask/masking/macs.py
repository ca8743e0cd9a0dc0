"""Multiply-accumulate operations (MACs) of a network, counted by running it once.

The convention is STR's: a multiplication with its addition counts once, and a sparse layer costs
its dense count times its density. RigL's figures count multiplications and additions separately
and are about twice as large; the two cannot be compared.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd
from torch.nn.utils.rnn import PackedSequence

from probmask.errors import InputError
from probmask.masking.batchnorm import evaluating
from probmask.masking.sites import Site, is_transformers_conv1d

CONVENTION = (
    "MACs by STR's convention: a multiply-accumulate counts once, times the density of its layer; "
    "BatchNorm, activations and biases count zero; average pooling, one per input element, is "
    "listed separately."
)


@dataclass(frozen=True)
class Macs:
    """The cost of one example: the uses of each weight, per site, and average pooling."""

    per_weight: tuple[int, ...]
    sizes: tuple[int, ...]
    pooling: int

    @property
    def dense(self) -> int:
        """MACs of the dense network."""
        return self.sparse(self.sizes)

    def sparse(self, kept: Sequence[int]) -> int:
        """Return the MACs of a network that keeps these numbers of weights, site by site."""
        if len(kept) != len(self.sizes):
            raise InputError(
                f"Macs.sparse(kept): {len(kept)} counts for {len(self.sizes)} sites; pass the "
                "number of weights that each site keeps."
            )
        for index, (count, size) in enumerate(zip(kept, self.sizes, strict=True)):
            if not 0 <= count <= size:
                raise InputError(
                    f"Macs.sparse(kept): kept[{index}]={count} for a site of {size} weights; pass "
                    "the number of weights that it keeps."
                )
        return sum(uses * count for uses, count in zip(self.per_weight, kept, strict=True))

    @property
    def dense_with_pooling(self) -> int:
        """MACs of the dense network with average pooling."""
        return self.dense + self.pooling

    def sparse_with_pooling(self, kept: Sequence[int]) -> int:
        """Return `sparse` with average pooling."""
        return self.sparse(kept) + self.pooling


def macs_per_weight(model: nn.Module, sites: Sequence[Site], example: Any) -> tuple[int, ...]:
    """Return, per site, the number of multiplications per weight for one example."""
    return count_macs(model, sites, example).per_weight


def count_macs(model: nn.Module, sites: Sequence[Site], example: Any) -> Macs:
    """Return the cost of one example, by `CONVENTION`. Padding counts as data.

    ``example`` is a batch for the model: a tensor, a sequence of positional arguments or a mapping
    of keyword arguments. A module that is called twice counts twice; one that is not called (such
    as a head for training only) does not count. Pooling counts only if it is a module. The model
    may be on the meta device, where nothing is computed.
    """
    batch = _batch_size(example)
    weights, pools = [id(site.weight) for site in sites], _average_pools(model)
    counts: Counter[int] = Counter()
    handles = [
        module.register_forward_hook(_adding(counts, key, measure), with_kwargs=True)
        for key, module, measure in [*_users(model, sites), *_pooling(pools)]
    ]
    try:
        # BatchNorm and random numbers stay unchanged. Fused attention would bypass the hooks.
        with evaluating(model), torch.random.fork_rng(devices=[]), _without_fused_attention():
            _call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return Macs(
        per_weight=tuple(counts[key] // batch for key in weights),
        sizes=tuple(site.size for site in sites),
        pooling=sum(counts[id(pool)] for pool in pools) // batch,
    )


class _without_fused_attention:  # noqa: N801 - reads as a statement
    """Disable the fused path of ``nn.TransformerEncoderLayer``, which calls no submodule."""

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
            f"example_inputs={type(example).__name__}: expected a batch for the model: a tensor, a "
            "tuple of positional or a dict of keyword arguments, batch dimension first."
        )
    return int(first.shape[0])


# Computes the count of one call from its arguments, keyword arguments and output.
_Measure = Callable[[tuple[Any, ...], dict[str, Any], Any], int]


def _adding(counts: Counter[int], key: int, measure: _Measure) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        counts[key] += measure(args, kwargs, output)

    return hook


def _users(model: nn.Module, sites: Sequence[Site]) -> Iterator[tuple[int, nn.Module, _Measure]]:
    """Yield every module that uses the weight of a site when it is called."""
    for site in sites:
        for module, name in site.holders:
            yield id(site.weight), module, partial(_uses, module, name)
    # Attention uses the weight of its output projection without calling that module.
    wanted = {id(site.weight) for site in sites}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            key = id(module.out_proj._parameters["weight"])
            if key in wanted:
                yield key, module, partial(_uses, module, "out_proj")


def _uses(
    module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> int:
    """Return the number of multiplications of each weight in one call of the module."""
    given = list(args) + list(kwargs.values())
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return int(given[0].numel()) // module.in_channels
    if isinstance(module, nn.modules.conv._ConvNd):
        return int(output.numel()) // module.out_channels
    if isinstance(module, nn.Linear | nn.Bilinear):
        return int(output.numel()) // module.out_features
    if is_transformers_conv1d(module):
        return int(output.numel()) // int(output.shape[-1])
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):  # each weight once per step of a sequence
        steps = given[0].data if isinstance(given[0], PackedSequence) else given[0]
        return int(steps.numel()) // module.input_size
    if isinstance(module, nn.MultiheadAttention):
        tokens = [
            int(tensor.numel()) // int(tensor.shape[-1])
            for position, argument in enumerate(("query", "key", "value"))
            for tensor in [kwargs[argument] if argument in kwargs else args[position]]
        ]
        if name == "in_proj_weight":  # the mean over the three projections in this tensor
            return round(sum(tokens) / 3)
        return tokens[{"k_proj_weight": 1, "v_proj_weight": 2}.get(name, 0)]
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 0  # it copies weights, or adds them
    raise InputError(
        f"{type(module).__name__}.{name}: its MACs are unknown, because it is not a convolution, a "
        "linear or recurrent layer or attention; exclude it or budget in parameters."
    )


def _average_pools(model: nn.Module) -> list[_AvgPoolNd | _AdaptiveAvgPoolNd]:
    return [m for m in model.modules() if isinstance(m, _AvgPoolNd | _AdaptiveAvgPoolNd)]


def _pooling(
    pools: Sequence[_AvgPoolNd | _AdaptiveAvgPoolNd],
) -> Iterator[tuple[int, nn.Module, _Measure]]:
    for pool in pools:
        yield id(pool), pool, partial(_added, pool)


def _window(pool: _AvgPoolNd) -> int:
    """Return the number of elements in one window."""
    kernel: Any = pool.kernel_size
    dimensions = 3 if isinstance(pool, nn.AvgPool3d) else 2  # AvgPool1d stores a tuple
    return int(math.prod(kernel if isinstance(kernel, tuple | list) else [kernel] * dimensions))


def _added(
    pool: _AvgPoolNd | _AdaptiveAvgPoolNd,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> int:
    """Return the number of additions in one call: the total size of all windows."""
    if isinstance(pool, _AvgPoolNd):
        return int(output.numel()) * _window(pool)
    given = [*args, *kwargs.values()][0]
    # Windows of adaptive pooling differ in size; along batch and channels they have size one.
    return math.prod(
        sum(-(-(i + 1) * size // parts) - i * size // parts for i in range(parts))
        for size, parts in zip(given.shape, output.shape, strict=True)
    )
