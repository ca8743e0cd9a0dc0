"""The networks, by the names they have on the command line."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from probmask.errors import InputError
from probmask.models.smallconv import smallconv
from probmask.names import lookup

MODELS: dict[str, Callable[..., nn.Module]] = {
    "smallconv": smallconv,
}


def model_settings(
    name: str, settings: Mapping[str, Any], *, suggested: Mapping[str, Any]
) -> dict[str, Any]:
    """``settings``, and those ``suggested`` (classes, channels of the data) that the network takes.

    With these it can be built again where the data is not at hand.
    """
    signature = inspect.signature(_find(name))
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    fitting = {k: v for k, v in suggested.items() if open_ended or k in signature.parameters}
    return {**fitting, **settings}


def build_model(
    name: str, settings: Mapping[str, Any], *, suggested: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build a network by name, or the user's own by ``package.module:function``.

    ``settings`` go to the function as keyword arguments, and ``suggested`` ones (the number of
    classes and channels of the data) where it takes them.
    """
    build = _find(name)
    signature = inspect.signature(build)
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
        reason = " ".join(str(error).split())
        raise InputError(f"--model {name}: cannot be built with {settings}: {reason}.") from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"--model {name}: returned {type(model).__name__}; expected a function that returns "
            "a torch.nn.Module."
        )
    return model


def _find(name: str) -> Callable[..., Any]:
    return _import(name) if ":" in name else lookup("model", "--model", name, MODELS)


def _import(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--model {name}: cannot be imported: {error}.") from error
    if not callable(found):
        raise InputError(f"--model {name}: is not a function that builds a model.")
    return found  # type: ignore[no-any-return]


__all__ = ["MODELS", "build_model", "model_settings"]
