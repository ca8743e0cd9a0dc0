"""Sites: the tensors of a model that can be masked, and their order."""

import difflib
import fnmatch
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from probmask.checks import check_choice
from probmask.errors import InputError
from probmask.masking.sharding import rows_of

MASKED_TABLE = "_masked_weights"  # the attribute of a module that holds its masked weights by name

Frozen = Literal["mask", "skip"]
"""What happens to weights with ``requires_grad=False``: they are masked, or not sites."""

# Module types whose weights are masked unless excluded, with the names of those weights.
# Embeddings and parameters of the user's own modules are masked only if included.
_MASKED_BY_DEFAULT: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (_ConvNd, ("weight",)),
    (nn.Linear, ("weight",)),
    (nn.Bilinear, ("weight",)),
    (nn.RNNCellBase, ("weight_ih", "weight_hh")),
    (
        nn.MultiheadAttention,
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
)


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor that can be masked: a parameter, and every place in the model that holds it."""

    name: str
    holders: tuple[tuple[nn.Module, str], ...]
    weight: nn.Parameter

    def current(self) -> "Site":
        """Return the site with the parameter that its module holds now."""
        module, name = self.holders[0]
        weight = module._parameters[name]
        assert weight is not None
        return Site(self.name, self.holders, weight)

    @property
    def rows(self) -> Tensor:
        """The weight, or its rows on this rank if FSDP2 shards it, sharing memory."""
        rows: Tensor = rows_of(self.weight)
        return rows

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.weight.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.weight.shape)

    @property
    def output_axis(self) -> int:
        """Dimension of the layer's outputs: 1 if the weight is stored as (in, out, …), else 0."""
        return int(is_stored_in_out(self.holders[0][0]) and self.weight.dim() > 1)


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Return whether a module is `Conv1D` of transformers: a linear layer with an (in, out) weight.

    The library is not imported: if nobody has imported it, the module is not one of its own.
    """
    library = sys.modules.get("transformers.pytorch_utils")
    kind = None if library is None else getattr(library, "Conv1D", None)
    return kind is not None and isinstance(module, kind)


def is_stored_in_out(module: nn.Module) -> bool:
    """Return whether the first dimension of the layer's weight is that of its inputs."""
    return isinstance(module, _ConvTransposeNd) or is_transformers_conv1d(module)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module multiplies its input by one matrix."""
    return isinstance(module, nn.Linear) or is_transformers_conv1d(module)


def find_sites(
    model: nn.Module,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    frozen: Frozen = "mask",
) -> tuple[Site, ...]:
    """Return the sites of a model in the order of its modules, each tensor once.

    The weights of convolutions (of any rank, grouped, transposed), linear and bilinear layers,
    recurrent layers and cells, and attention projections are sites, and those of ``Conv1D`` of
    transformers. A tensor that several modules share is one site; if one of them is an embedding,
    it is a site only if included. Patterns are shell-style and match the name of the parameter
    (``"layer1.0.conv1.weight"``) or of its module (``"layer1.0.conv1"``).

    Args:
        model: The model.
        include: Patterns of further parameters, such as ``"embed*"``.
        exclude: Patterns of parameters that are not sites. It takes precedence over ``include``.
        frozen: Whether weights with ``requires_grad=False`` are sites ("mask") or not ("skip").

    Returns:
        The sites.

    Raises:
        InputError: If a pattern matches nothing, nothing can be masked, a selected tensor cannot
            be masked, or `torch.nn.utils.prune` still masks the model.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> [site.name for site in probmask.find_sites(model)]
        ['0.weight']
    """
    return select_sites("find_sites", model, include, exclude, frozen)


def select_sites(
    caller: str,
    model: nn.Module,
    include: Iterable[str],
    exclude: Iterable[str],
    frozen: Frozen = "mask",
) -> tuple[Site, ...]:
    """Do what `find_sites` does; errors name the ``caller``."""
    check_is_module(caller, model)
    check_choice(caller, "frozen", frozen, ("mask", "skip"))
    check_not_pruned_by_torch(caller, model)
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    weights: dict[int, nn.Parameter] = {}
    for path, module, name, weight in _parameters(model):
        weights[id(weight)] = weight
        holders.setdefault(id(weight), []).append((path, module, name))
    paths = [path for places in holders.values() for path, _, _ in places]
    included = _matching("include", include, paths)
    excluded = _matching("exclude", exclude, paths)
    _check_not_computed(caller, model, excluded, frozen)

    sites = []
    for key, places in holders.items():
        names = {path for path, _, _ in places}
        wanted = bool(names & included) or _is_default(places)
        skipped = frozen == "skip" and not weights[key].requires_grad
        if not wanted or names & excluded or skipped:
            continue
        _check_maskable(caller, places, weights[key])
        pairs = tuple((module, name) for _, module, name in places)
        sites.append(Site(places[0][0], pairs, weights[key]))
    if not sites:
        raise InputError(
            f"{caller}(model): there is nothing to mask: the model has no convolution, linear or "
            "recurrent layer or attention that is not excluded"
            + (" or skipped by frozen='skip'" if frozen == "skip" else "")
            + "; name other parameters with include=."
        )
    return tuple(sites)


def find_unmasked(
    model: nn.Module, sites: Sequence[Site], *, exclude: Iterable[str] = ()
) -> list[tuple[str, Tensor]]:
    """Return the tensors of two or more dimensions that are not sites, by name, each once.

    A shared tensor is excluded if one of its names is.
    """
    found: list[tuple[str, Tensor]] = []
    places = [(path, weight) for path, _, _, weight in _parameters(model)]
    excluded = _matching("exclude", exclude, [path for path, _ in places])
    seen = {id(site.weight) for site in sites}
    seen |= {id(weight) for path, weight in places if path in excluded}
    for path, weight in places:
        uninitialized = isinstance(weight, UninitializedParameter)
        if id(weight) in seen or uninitialized or weight.ndim < 2:
            continue
        seen.add(id(weight))
        found.append((path, weight))
    return found


def check_is_module(caller: str, model: object) -> None:
    """Raise an `InputError` for anything but a network."""
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InputError(f"{caller}(model): expected an nn.Module, not {given}; pass the network.")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and ``torch.compile``, which `accelerator.prepare` may add.

    It has the names that the user knows, and the wrappers see its masks.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # testing the class would import the compiler
            model = model.get_submodule("_orig_mod")
        else:
            return model


def name_patterns(argument: str, patterns: object) -> tuple[str, ...]:
    """Return name patterns as a tuple, after checking them. One text is one pattern."""
    given = patterns if isinstance(patterns, Iterable) else (patterns,)
    given = (given,) if isinstance(given, str) else tuple(given)
    for pattern in given:
        if not isinstance(pattern, str):
            raise InputError(
                f"{argument}={pattern!r}: must be a name pattern, such as 'layer1.*' or 'head'."
            )
    return given


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the name of a parameter, or that of its module, fits one of the patterns."""
    names = (name, name.rpartition(".")[0])
    return any(fnmatch.fnmatchcase(each, pattern) for each in names for pattern in patterns)


def is_masked(module: nn.Module, name: str) -> bool:
    """Return whether a parameter of a module is masked."""
    return name in vars(module).get(MASKED_TABLE, ())


def check_not_pruned_by_torch(caller: str, model: nn.Module) -> None:
    """Raise if `torch.nn.utils.prune` still masks a tensor of the model.

    Such a module holds ``weight_orig`` and ``weight_mask`` instead of a parameter ``weight``.
    """
    pruned = [
        (f"{prefix}.{hook._tensor_name}" if prefix else hook._tensor_name, hook._tensor_name)
        for prefix, module in model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]
    if pruned:
        path, name = pruned[0]
        others = f" (and {len(pruned) - 1} more)" if len(pruned) > 1 else ""
        raise InputError(
            f"{caller}(model): torch.nn.utils.prune still masks {path}{others}; make its zeros "
            f"permanent first: torch.nn.utils.prune.remove(module, {name!r}), for each module."
        )


def _check_not_computed(caller: str, model: nn.Module, excluded: set[str], frozen: Frozen) -> None:
    """Raise if a hook computes a weight from other parameters before each call of its module."""
    for prefix, module in model.named_modules():
        for name in _default_names(module):
            if name in module._parameters or parametrize.is_parametrized(module, name):
                continue
            path = f"{prefix}.{name}" if prefix else name
            sources = [
                other
                for other, parameter in module._parameters.items()
                if other.startswith(f"{name}_")
                and parameter is not None
                and (frozen == "mask" or parameter.requires_grad)
            ]
            if sources and not {path.removesuffix(name) + each for each in sources} & excluded:
                raise InputError(
                    f"{caller}(model): a hook computes {path} from {' and '.join(sources)}; remove "
                    f"it first, {_removal(module, name)}, or pass exclude={prefix or sources[0]!r}."
                )


def _removal(module: nn.Module, name: str) -> str:
    """Return the call that turns a weight computed by a hook into a plain parameter."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm) and hook.name == name:
            return f"torch.nn.utils.remove_weight_norm(module, {name!r})"
        if isinstance(hook, SpectralNorm) and hook.name == name:
            return f"torch.nn.utils.remove_spectral_norm(module, {name!r})"
    return "so that it is a parameter of the module"


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield every parameter with every module that holds it; shared tensors appear repeatedly."""
    for prefix, module in model.named_modules():
        if "parametrizations" in prefix.split("."):
            continue
        for name, weight in module.named_parameters(recurse=False):
            yield (f"{prefix}.{name}" if prefix else name), module, name, weight
        if parametrize.is_parametrized(module):
            for name, originals in module.parametrizations.items():
                for weight in originals.parameters(recurse=False):
                    yield (f"{prefix}.{name}" if prefix else name), module, name, weight


def _is_default(places: Sequence[tuple[str, nn.Module, str]]) -> bool:
    if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for _, module, _ in places):
        return False
    return any(name in _default_names(module) for _, module, name in places)


def _default_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's weights that are masked unless excluded."""
    if isinstance(module, nn.RNNBase):
        return tuple(name for name in module._flat_weights_names if name.startswith("weight_"))
    if is_transformers_conv1d(module):
        return ("weight",)
    return next((names for kind, names in _MASKED_BY_DEFAULT if isinstance(module, kind)), ())


def _matching(argument: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in name_patterns(argument, patterns):
        hits = {path for path in paths if matches(path, [pattern])}
        if not hits:
            near = difflib.get_close_matches(pattern, paths, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see model.named_parameters()."
            raise InputError(f"{argument}={pattern!r}: it matches no parameter of the model{hint}")
        found |= hits
    return found


def _check_maskable(
    caller: str, places: Sequence[tuple[str, nn.Module, str]], weight: Tensor
) -> None:
    path, module, _ = places[0]
    if isinstance(weight, UninitializedParameter):
        raise InputError(
            f"{caller}(model): {path} is not initialized yet; pass one batch through model.eval() "
            "first."
        )
    if any(getattr(holder, "sparse", False) is True for _, holder, _ in places):
        raise InputError(
            f"include={path!r}: {type(module).__name__}(sparse=True) has sparse gradients, which "
            "no method supports; build it with sparse=False."
        )
    if any(is_masked(holder, attribute) for _, holder, attribute in places):
        raise InputError(
            f"{caller}(model): {path} is already masked; finalize the earlier sparsifier first. To "
            "continue with a copy, load its state_dict() into a model without masks."
        )
    for name, holder, attribute in places:
        if parametrize.is_parametrized(holder, attribute):
            raise InputError(
                f"{caller}(model): {name} is computed by a parametrization, as that of weight_norm "
                "or spectral_norm; remove it first, torch.nn.utils.parametrize."
                f"remove_parametrizations(module, {attribute!r}), or pass exclude={name!r}."
            )
    if not weight.is_floating_point():
        raise InputError(
            f"{caller}(model): {path} has dtype {weight.dtype}; only floating-point tensors can be "
            f"masked; pass exclude={path!r}."
        )
