"""Sites: the tensors of a model that can be masked, and their order."""

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from probmask.errors import InputError

# Module types whose weights are masked unless excluded, with the names of those weights.
# Embeddings and parameters of the user's own modules are masked on request (`include`).
_MASKED_BY_DEFAULT: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.modules.conv._ConvNd, ("weight",)),
    (nn.Linear, ("weight",)),
    (nn.Bilinear, ("weight",)),
    (
        nn.MultiheadAttention,
        ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    ),
)
# These read flat copies of their weights past any parametrization: a mask would have no effect.
_UNMASKABLE = (nn.RNNBase,)


@dataclass(frozen=True, eq=False)
class Site:
    """One tensor that can be masked: a parameter, and every place in the model that holds it."""

    name: str
    holders: tuple[tuple[nn.Module, str], ...]
    weight: nn.Parameter

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.weight.numel()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return tuple(self.weight.shape)


def find_sites(
    model: nn.Module, *, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> tuple[Site, ...]:
    """List the sites of a model in the order of its modules, each tensor once.

    All weights of convolutions (any rank, grouped, transposed), linear layers and attention
    projections are sites. ``include`` adds others by name pattern (``"embed*"``); ``exclude`` takes
    away and has the last word. Patterns are shell-style and match the parameter's name
    (``"layer1.0.conv1.weight"``) or its module's (``"layer1.0.conv1"``); one that matches nothing
    is an error. A tensor tied between modules is one site; tied to an embedding, it is an
    embedding, which is masked only on request.
    """
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {}
    weights: dict[int, nn.Parameter] = {}
    for path, module, name, weight in _parameters(model):
        weights[id(weight)] = weight
        holders.setdefault(id(weight), []).append((path, module, name))
    paths = [path for places in holders.values() for path, _, _ in places]
    included = _matching("include", include, paths)
    excluded = _matching("exclude", exclude, paths)

    sites = []
    for key, places in holders.items():
        names = {path for path, _, _ in places}
        wanted = bool(names & included) or _is_default(places)
        if not wanted or names & excluded:
            continue
        _check_maskable(places, weights[key])
        pairs = tuple((module, name) for _, module, name in places)
        sites.append(Site(places[0][0], pairs, weights[key]))
    if not sites:
        raise InputError(
            "attach(model): nothing to mask; no convolution, linear or attention weight is left "
            "(recurrent layers cannot be masked); name other tensors to mask with include=."
        )
    return tuple(sites)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Every parameter with every module that holds it: tied tensors come up more than once."""
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
    if isinstance(patterns, str):
        patterns = (patterns,)
    found: set[str] = set()
    for pattern in patterns:
        hits = {
            path
            for path in paths
            if fnmatch.fnmatchcase(path, pattern)
            or fnmatch.fnmatchcase(path.rpartition(".")[0], pattern)
        }
        if not hits:
            near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise InputError(f"{argument}={pattern!r}: matches no parameter of the model{hint}.")
        found |= hits
    return found


def _check_maskable(places: Sequence[tuple[str, nn.Module, str]], weight: Tensor) -> None:
    path, module, name = places[0]
    if isinstance(weight, UninitializedParameter):
        raise InputError(
            f"attach(model): {path} has no shape yet; run one batch through model.eval() first."
        )
    if any(isinstance(holder, _UNMASKABLE) for _, holder, _ in places):
        raise InputError(
            f"include={path!r}: {type(module).__name__} reads its weights past any mask; "
            "masking it is not supported."
        )
    if any(getattr(holder, "sparse", False) is True for _, holder, _ in places):
        raise InputError(
            f"include={path!r}: {type(module).__name__}(sparse=True) has sparse gradients, "
            "of which no mask can be learned; build it with sparse=False."
        )
    if any(parametrize.is_parametrized(holder, attribute) for _, holder, attribute in places):
        raise InputError(
            f"attach(model): {path} is already parametrized; finalize the earlier sparsifier (of a "
            "copy: of the model that was copied, with the copy's state_dict() loaded) or remove "
            "that parametrization first, or pass exclude=."
        )
    if not weight.is_floating_point():
        raise InputError(f"include={path!r}: {name} holds {weight.dtype}, not real numbers.")
