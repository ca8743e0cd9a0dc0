"""The table of networks, and functions that check, build and describe them by name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from probmask.errors import InputError
from probmask.masking.macs import count_macs
from probmask.masking.sites import find_sites
from probmask.messages import NamedTable, lookup, one_line, suggestion
from probmask.models.bert import bert
from probmask.models.blocks import check_arguments
from probmask.models.convnet import conv4, lenet5, mobilenetv1, smallconv, vgg19
from probmask.models.mlp import lenet300
from probmask.models.own_code import import_own
from probmask.models.resnet import resnet14, resnet20, resnet32, resnet50, resnet_name
from probmask.models.text_encoder import text_encoder
from probmask.models.vision_transformer import vit
from probmask.parsing import Source, unknown_key

_DIGITS, _MNIST, _CIFAR, _IMAGENET = (1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 224, 224)
_TOKENS = 64  # length of the sentence for which operations are listed


@dataclass(frozen=True)
class Network:
    """A network of the table.

    Attributes:
        build: Function that returns the network; its arguments are the settings.
        image_shape: (channels, height, width) of the images the network is designed for; None if
            it takes sentences.
        classes: Numbers of classes for which the network is listed.
        exclude: Patterns of weights that stay dense unless the configuration sets ``exclude``, or
            names them in ``include``.
        own_name: Function that returns the name here of a tensor in the files of another package.
    """

    build: Callable[..., nn.Module]
    image_shape: tuple[int, int, int] | None
    classes: tuple[int, ...]
    exclude: tuple[str, ...] = ()
    own_name: Callable[[str], str] | None = None

    @property
    def summary(self) -> str:
        """Description in one line, from the docstring of `build`."""
        return (self.build.__doc__ or "").strip().split("\n")[0].rstrip(".")


MODELS = NamedTable(
    "model",
    {
        "smallconv": Network(smallconv, _DIGITS, (10,)),
        "lenet300": Network(lenet300, _MNIST, (10,)),
        "lenet5": Network(lenet5, _MNIST, (10,)),
        "conv4": Network(conv4, _CIFAR, (10,)),
        "resnet14": Network(resnet14, _CIFAR, (10,), own_name=resnet_name),
        "resnet20": Network(resnet20, _CIFAR, (10,), own_name=resnet_name),
        "resnet32": Network(resnet32, _CIFAR, (10, 100), own_name=resnet_name),
        "vgg19": Network(vgg19, _CIFAR, (10, 100)),
        "mobilenetv1": Network(mobilenetv1, _IMAGENET, (1000,)),
        "resnet50": Network(resnet50, _IMAGENET, (1000,), own_name=resnet_name),
        "vit": Network(vit, _CIFAR, (10,)),
        "text_encoder": Network(
            text_encoder, None, (2,), exclude=("tokens.weight", "positions.weight")
        ),
        "bert": Network(
            bert, None, (2,), exclude=("bert.embeddings.*", "bert.pooler.*", "classifier")
        ),
    },
)
# Every network takes these, so a function with **settings can pass them on to any network.
_COMMON_SETTINGS = ("classes", "channels")


def model_settings(
    name: str, settings: Mapping[str, Any], *, suggested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings with which `build_model` calls the function of a network.

    These settings alone are enough to build the network again, without the data set.

    Args:
        name: Name in `MODELS`, or ``package.module:function``.
        settings: Settings chosen by the user; they take precedence.
        suggested: Settings that follow from the data: ``classes``, and ``channels`` and
            ``image_size``, or ``vocabulary`` and ``max_length``. Each is used only if the
            function's signature names it. A function with ``**settings`` also receives
            ``classes`` and ``channels``.

    Returns:
        The keyword arguments of the function.

    Raises:
        InputError: If there is no such network.

    Example:
        >>> data = {"classes": 100, "channels": 3, "image_size": [32, 32]}
        >>> model_settings("resnet20", {"width": 8}, suggested=data)
        {'classes': 100, 'channels': 3, 'width': 8}
    """
    parameters = inspect.signature(_find(name)).parameters
    accepted = set(parameters)
    if _takes_any_keyword(parameters):
        accepted.update(_COMMON_SETTINGS)
    return {key: value for key, value in suggested.items() if key in accepted} | dict(settings)


def check_model_settings(
    name: str, settings: Mapping[str, Any], *, naming: str = "--model", source: Source | None = None
) -> None:
    """Check the name and the settings of a network without building it.

    Networks of the user (``package.module:function``) are not imported and not checked.

    Args:
        name: Name in `MODELS`, or ``package.module:function``.
        settings: Settings of the network.
        naming: What precedes the name in error messages.
        source: Where the settings come from, for error messages.

    Raises:
        InputError: If the network does not exist, does not take a setting, or does not take its
            value.

    Example:
        >>> check_model_settings("resnet20", {"width": 8})
    """
    if ":" not in name:
        build = lookup("model", naming, name, MODELS).build
        _check_keys(settings, inspect.signature(build), source or f"{naming} {name}")
        check_arguments("model_args", **settings)


def build_model(
    name: str,
    settings: Mapping[str, Any] | None = None,
    *,
    suggested: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a network by name.

    Args:
        name: Name in `MODELS`, or ``package.module:function`` for a function of your own that
            returns an `nn.Module`.
        settings: Keyword arguments of the function.
        suggested: Arguments that follow from the data; see `model_settings`.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If the network does not exist, cannot be imported, or cannot be built with
            these settings. Errors raised by a function of your own pass through unchanged.

    Example:
        >>> model = build_model("resnet20", {"width": 8}, suggested={"classes": 100})
        >>> model.classifier.out_channels
        100
    """
    build = _find(name)
    signature = inspect.signature(build)
    _check_keys(settings or {}, signature, f"--model {name}")
    arguments = model_settings(name, settings or {}, suggested=suggested or {})
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(f"--model {name}: {error}; its signature is {signature}.") from error
    model = build(**arguments) if ":" in name else _build_listed(name, build, arguments)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model {name}: the function returned {type(model).__name__}; it must return a "
            "torch.nn.Module."
        )
    return model


def describe_models() -> list[dict[str, Any]]:
    """Describe each network with its default settings, once per listed number of classes.

    The networks are built on the meta device, so this takes no memory for weights.

    Returns:
        One dictionary per network and number of classes. ``layers`` and ``weights`` count what
        can be masked, ``parameters`` counts all parameters. ``macs`` are the
        multiply-accumulates of the weights for one image, or for a sentence of 64 tokens;
        ``pooling_macs`` are not included.

    Example:
        >>> rows = describe_models()
        >>> rows[0]["name"], rows[0]["weights"]
        ('smallconv', 101960)
    """
    return [
        _describe(name, network, classes)
        for name, network in MODELS.items()
        for classes in network.classes
    ]


def _describe(name: str, network: Network, classes: int) -> dict[str, Any]:
    shape = network.image_shape
    suggested: dict[str, Any] = {"classes": classes}
    if shape is not None:
        suggested |= {"channels": shape[0], "image_size": list(shape[1:])}
    with torch.device("meta"):
        model = build_model(name, suggested=suggested)
        example = torch.empty(1, _TOKENS, dtype=torch.long)
        if shape is not None:
            example = torch.empty(1, *shape)
    sites = find_sites(model, exclude=network.exclude)
    macs = count_macs(model, sites, example)
    return {
        "name": name,
        "summary": network.summary,
        "image_shape": None if shape is None else list(shape),
        "classes": classes,
        "layers": len(sites),
        "weights": sum(site.size for site in sites),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "macs": macs.dense,
        "pooling_macs": macs.pooling,
    }


def _build_listed(
    name: str, build: Callable[..., nn.Module], arguments: Mapping[str, Any]
) -> nn.Module:
    try:
        return build(**arguments)
    except InputError as error:  # its message starts with the name of the network
        raise InputError(f"--model {error}") from error
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = one_line(error)
        raise InputError(f"--model {name}: cannot be built with {arguments}: {reason}.") from error


def _check_keys(settings: Mapping[str, Any], signature: inspect.Signature, source: Source) -> None:
    """Raise InputError for a key that the function does not take."""
    parameters = signature.parameters
    if _takes_any_keyword(parameters):
        return
    for key in settings:
        if key not in parameters:
            hint = suggestion(key, parameters) if parameters else "this network has no settings."
            raise unknown_key(f"model_args.{key}", hint, source)


def _takes_any_keyword(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def _find(name: str) -> Callable[..., Any]:
    if ":" not in name:
        return lookup("model", "--model", name, MODELS).build
    found = import_own(name, label="--model")
    if not callable(found):
        raise InputError(f"--model {name}: is not a function that returns a model.")
    return found  # type: ignore[no-any-return]
