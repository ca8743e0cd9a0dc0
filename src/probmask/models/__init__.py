"""The networks, by the names they have on the command line."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from probmask.errors import InputError
from probmask.messages import lookup, suggestion
from probmask.models.arguments import check_arguments
from probmask.models.conv4 import conv4
from probmask.models.mobilenetv1 import mobilenetv1
from probmask.models.resnet50 import resnet50
from probmask.models.resnet_cifar import resnet14, resnet20, resnet32
from probmask.models.smallconv import smallconv
from probmask.models.vgg import vgg19
from probmask.parsing import Source, unknown_key

_DIGITS, _CIFAR, _IMAGENET = (1, 8, 8), (3, 32, 32), (3, 224, 224)


@dataclass(frozen=True)
class Network:
    """How a network is built, and the images and numbers of classes that it is made for."""

    build: Callable[..., nn.Module]
    image_shape: tuple[int, int, int]
    classes: tuple[int, ...]

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return (self.build.__doc__ or "").strip().split("\n")[0].rstrip(".")


MODELS: dict[str, Network] = {
    "smallconv": Network(smallconv, _DIGITS, (10,)),
    "conv4": Network(conv4, _CIFAR, (10,)),
    "resnet14": Network(resnet14, _CIFAR, (10,)),
    "resnet20": Network(resnet20, _CIFAR, (10,)),
    "resnet32": Network(resnet32, _CIFAR, (10, 100)),
    "vgg19": Network(vgg19, _CIFAR, (10, 100)),
    "mobilenetv1": Network(mobilenetv1, _IMAGENET, (1000,)),
    "resnet50": Network(resnet50, _IMAGENET, (1000,)),
}
# What every network takes, and so what a function with **settings can hand on to any of them.
_TAKEN_BY_ALL = ("classes", "channels")


def model_settings(
    name: str, settings: Mapping[str, Any], *, suggested: Mapping[str, Any]
) -> dict[str, Any]:
    """``settings``, and those ``suggested`` by the data that the network's function takes.

    The data suggests ``classes``, ``channels`` and ``image_size``. A function takes what its
    signature names; one with ``**settings`` also takes the first two. With these the network can be
    built again where the data is not at hand.
    """
    parameters = inspect.signature(_find(name)).parameters
    taken = set(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        taken.update(_TAKEN_BY_ALL)
    return {key: value for key, value in suggested.items() if key in taken} | dict(settings)


def check_model_settings(
    name: str, settings: Mapping[str, Any], *, naming: str, source: Source | None = None
) -> None:
    """Refuse a network that there is not, and settings, or values of them, that it does not take.

    In errors ``naming`` stands before the name, ``source`` says where the settings are from. The
    user's own functions are not looked at before they are needed.
    """
    if ":" not in name:
        build = lookup("model", naming, name, MODELS).build
        _check_known(settings, inspect.signature(build), source or f"{naming} {name}")
        check_arguments("model_args", **settings)


def build_model(
    name: str, settings: Mapping[str, Any], *, suggested: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a network by name, or the user's own by ``package.module:function``.

    ``settings`` go to the function as keyword arguments, and ``suggested`` ones where it takes them
    (see `model_settings`).
    """
    build = _find(name)
    signature = inspect.signature(build)
    _check_known(settings, signature, f"--model {name}")
    settings = model_settings(name, settings, suggested=suggested or {})
    try:
        arguments = signature.bind(**settings)
    except TypeError as error:
        raise InputError(f"--model {name}: {error}; it takes {signature}.") from error
    try:
        model = build(*arguments.args, **arguments.kwargs)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if ":" in name:  # the user's own code: its traceback is what helps
            raise
        if isinstance(error, InputError):  # it begins with the network's name
            raise InputError(f"--model {error}") from error
        reason = " ".join(str(error).split())
        raise InputError(f"--model {name}: cannot be built with {settings}: {reason}.") from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model {name}: returned {type(model).__name__}; expected a function that returns "
            "a torch.nn.Module."
        )
    return model


def _check_known(settings: Mapping[str, Any], signature: inspect.Signature, source: Source) -> None:
    """Refuse keys that the network's function does not take, unless it takes any."""
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for key in settings:
        if key not in parameters:
            there = suggestion(key, parameters) if parameters else "it takes none."
            raise unknown_key(f"model_args.{key}", there, source)


def _find(name: str) -> Callable[..., Any]:
    return _import(name) if ":" in name else lookup("model", "--model", name, MODELS).build


def _import(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--model {name}: cannot be imported: {error}.") from error
    if not callable(found):
        raise InputError(f"--model {name}: is not a function that builds a model.")
    return found  # type: ignore[no-any-return]


__all__ = [
    "MODELS",
    "Network",
    "build_model",
    "check_model_settings",
    "conv4",
    "mobilenetv1",
    "model_settings",
    "resnet14",
    "resnet20",
    "resnet32",
    "resnet50",
    "smallconv",
    "vgg19",
]
