"""Sites: the tensors of a model that can be masked, and their order."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize, prune

from probmask.errors import InputError

MASKED_TABLE = "_masked_weights"  # the attribute of a module that holds its masked weights by name

# Module types whose weights are masked unless excluded, with the names of those weights.
# Embeddings and parameters of the user's own modules are masked only if included.
_MASKED_BY_DEFAULT: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.modules.conv._ConvNd, ("weight",)),
    (nn.Linear, ("weight",)),
    (nn.Bilinear, ("weight",)),
    (
        nn.MultiheadAttention,
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
)
# These read flat copies of their weights, which a mask would not change.
_UNMASKABLE = (nn.RNNBase,)


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor that can be masked: a parameter, and every place in the model that holds it."""

    name: str
    holders: tuple[tuple[nn.Module, str], ...]
    weight: nn.Parameter

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.weight.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.weight.shape)


def find_sites(
    model: nn.Module, *, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[Site, ...]:
    """Return the sites of a model in the order of its modules, each tensor once.

    The weights of convolutions (of any rank, grouped, transposed), linear layers and attention
    projections are sites. A tensor that several modules share is one site; if one of them is an
    embedding, it is a site only if included. Patterns are shell-style and match the name of the
    parameter (``"layer1.0.conv1.weight"``) or of its module (``"layer1.0.conv1"``).

    Args:
        model: The model.
        include: Patterns of further parameters, such as ``"embed*"``.
        exclude: Patterns of parameters that are not sites. It takes precedence over ``include``.

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
    return select_sites("find_sites", model, include, exclude)


def select_sites(
    caller: str, model: nn.Module, include: Iterable[str], exclude: Iterable[str]
) -> tuple[Site, ...]:
    """Do what `find_sites` does; errors name the ``caller``."""
    check_is_module(caller, model)
    check_not_pruned_by_torch(caller, model)
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    weights: dict[int, nn.Parameter] = {}
    for path, module, name, weight in _parameters(model):
        weights[id(weight)] = weight
        holders.setdefault(id(weight), []).append((path, module, name))
    paths = [path for places in holders.values() for path, _, _ in places]
    included = _matching("include", include, paths)
    excluded = _matching("exclude", exclude, paths)
    _check_not_computed(caller, model, excluded)

    sites = []
    for key, places in holders.items():
        names = {path for path, _, _ in places}
        wanted = bool(names & included) or _is_default(places)
        if not wanted or names & excluded:
            continue
        _check_maskable(caller, places, weights[key])
        pairs = tuple((module, name) for _, module, name in places)
        sites.append(Site(places[0][0], pairs, weights[key]))
    if not sites:
        raise InputError(
            f"{caller}(model): there is nothing to mask: the model has no convolution, linear "
            "layer or attention that is not excluded, and recurrent layers cannot be masked; name "
            "other parameters with include=."
        )
    return tuple(sites)


def find_unmasked(
    model: nn.Module, sites: Sequence[Site], *, exclude: Iterable[str] = ()
) -> list[tuple[str, Tensor]]:
    """Return the tensors of two or more dimensions that are not sites, by name, each once."""
    seen = {id(site.weight) for site in sites}
    found: list[tuple[str, Tensor]] = []
    places = [(path, weight) for path, _, _, weight in _parameters(model)]
    excluded = _matching("exclude", exclude, [path for path, _ in places])
    for path, weight in places:
        uninitialized = isinstance(weight, UninitializedParameter)
        if id(weight) in seen or path in excluded or uninitialized or weight.ndim < 2:
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


def _check_not_computed(caller: str, model: nn.Module, excluded: set[str]) -> None:
    """Raise if a hook computes a weight from other parameters before each call of its module."""
    for prefix, module in model.named_modules():
        for kind, names in _MASKED_BY_DEFAULT:
            for name in names if isinstance(module, kind) else ():
                if name in module._parameters or parametrize.is_parametrized(module, name):
                    continue
                path = f"{prefix}.{name}" if prefix else name
                sources = [other for other in module._parameters if other.startswith(name)]
                if sources and not {path.removesuffix(name) + each for each in sources} & excluded:
                    raise InputError(
                        f"{caller}(model): a hook computes {path} from {' and '.join(sources)}, as "
                        "torch.nn.utils.weight_norm and spectral_norm do; remove it first "
                        "(remove_weight_norm, remove_spectral_norm), or pass exclude="
                        f"{prefix or sources[0]!r}."
                    )


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
    return any(
        isinstance(module, kind) and name in names
        for _, module, name in places
        for kind, names in _MASKED_BY_DEFAULT
    )


def _matching(argument: str, patterns: Iterable[str], paths: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for pattern in name_patterns(argument, patterns):
        hits = {
            path
            for path in paths
            if fnmatch.fnmatchcase(path, pattern)
            or fnmatch.fnmatchcase(path.rpartition(".")[0], pattern)
        }
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
    if any(isinstance(holder, _UNMASKABLE) for _, holder, _ in places):
        raise InputError(
            f"include={path!r}: {type(module).__name__} cannot be masked: it computes with flat "
            "copies of its weights."
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
    if any(parametrize.is_parametrized(holder, attribute) for _, holder, attribute in places):
        raise InputError(
            f"{caller}(model): {path} has a parametrization of torch.nn.utils.parametrize; remove "
            f"it first, or pass exclude={path!r}."
        )
    if not weight.is_floating_point():
        raise InputError(
            f"{caller}(model): {path} has dtype {weight.dtype}; only floating-point tensors can be "
            f"masked; pass exclude={path!r}."
        )
