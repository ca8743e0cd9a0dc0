"""The optimizer of a run: its settings, its defaults by name, and how it is built."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from probmask.checks import check_within
from probmask.errors import InputError
from probmask.messages import one_line, shown
from probmask.models.own_code import import_own
from probmask.optim import HAM
from probmask.training.checkpoint import check_storable

_LARGEST_FLOAT = 1e38  # PyTorch refuses to multiply float32 tensors by larger numbers
_MOST_ADAMW_LR = 0.05
# Values of settings that are None. An optimizer of another class has no such defaults.
_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4},
    "adamw": {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.01},
}
_OF_PYTORCH = "torch.optim:"
# Arguments that have a setting of their own.
_NOT_IN_ARGS = ("params", "lr")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. The learning rate warms up linearly, then follows a cosine to zero.

    Args:
        name: ``"sgd"``, ``"adamw"``, or ``"package.module:Class"`` for any other class of
            optimizer, such as ``"torch.optim:RMSprop"``.
        lr: Largest learning rate. None: 0.1 for SGD, 0.001 for AdamW. Other classes need one.
        momentum: Momentum of SGD; AdamW's β₁. None: 0.9. Only for these two.
        weight_decay: L2 penalty of SGD on the weights, AdamW's decoupled decay. None: 5e-4 for
            SGD, 0.01 for AdamW. Only for these two.
        args: Further arguments of the class, such as ``{"betas": [0.9, 0.98]}``.
        nesterov: Use Nesterov momentum; SGD only.
        ham: Add the multiplicative step of `probmask.optim.HAM`, with its default settings.
        warmup_epochs: Epochs of the linear warm-up, which may be a fraction.
        clip_norm: Largest norm of the gradient, or None for no clipping.
        every: Whether the learning rate changes at every update ("step") or once per epoch.
    """

    name: str = "sgd"
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    nesterov: bool = False
    ham: bool = False
    warmup_epochs: float = 0.0
    clip_norm: float | None = None
    every: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        if ":" in self.name:
            self._check_other_class()
        elif self.name not in _DEFAULTS:
            raise InputError(
                f"optimizer(name={shown(self.name)}): expected 'sgd', 'adamw', or another class as "
                "package.module:Class, such as 'torch.optim:RMSprop'."
            )
        for name, default in _DEFAULTS.get(self.name, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_numbers()
        for name in _NOT_IN_ARGS:
            if name in self.args:
                raise InputError(
                    f"optimizer(args={shown(self.args)}): {name} is not a further argument; "
                    "set the learning rate as optimizer.lr."
                )
        if self.name == "adamw":
            self._check_adamw()
        if self.nesterov and self.momentum == 0:
            raise InputError(
                "optimizer(nesterov=True, momentum=0): Nesterov momentum needs a momentum above 0."
            )

    @property
    def rate(self) -> float:
        """Largest learning rate."""
        assert self.lr is not None  # filled in when the settings were checked
        return self.lr

    def _check_numbers(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "warmup_epochs"):
            value = getattr(self, name)
            if value is not None:
                check_within("optimizer", name, value, 0, _LARGEST_FLOAT, meaning="a number")
        if self.clip_norm is not None:
            check_within(
                "optimizer", "clip_norm", self.clip_norm, 1e-30, math.inf, meaning="a positive norm"
            )

    def _check_other_class(self) -> None:
        if self.lr is None:
            raise InputError(
                f"optimizer(name={shown(self.name)}): this class has no default learning rate; "
                "set optimizer.lr."
            )
        for name in ("momentum", "weight_decay", "nesterov"):
            if getattr(self, name) not in (None, False):
                raise InputError(
                    f"optimizer({name}={getattr(self, name)}): is a setting of sgd and adamw; pass "
                    f"the arguments of {self.name} as optimizer.args = {{ {name} = … }}."
                )

    def _check_adamw(self) -> None:
        if self.nesterov:
            raise InputError(
                "optimizer(name='adamw', nesterov=True): AdamW has no Nesterov momentum; omit it."
            )
        if self.rate > _MOST_ADAMW_LR:
            raise InputError(
                f"optimizer(name='adamw', lr={self.lr:g}): AdamW moves every weight by about lr "
                f"in an update; pass an lr of at most {_MOST_ADAMW_LR:g}, such as 0.001."
            )
        check_within(
            "optimizer", "momentum", self.momentum, 0, 1 - 2**-24, meaning="the β₁ of AdamW"
        )


def is_own_optimizer(name: str) -> bool:
    """Return whether the optimizer is neither part of probmask's settings nor of PyTorch."""
    return ":" in name and not name.startswith(_OF_PYTORCH)


def build_optimizer(settings: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of these parameters.

    Raises:
        InputError: The class cannot be imported, is not an optimizer, does not take the arguments,
            needs a closure, or has a state that a checkpoint cannot store.
    """
    build = optimizer_factory(settings)
    if ":" in settings.name:
        _check_trial(settings, build)
    optimizer = build(parameters)
    return HAM(optimizer) if settings.ham else optimizer


def optimizer_factory(settings: OptimizerConfig) -> Callable[[Iterable[Tensor]], Optimizer]:
    """Return a function that builds the optimizer, without HAM, of any parameters."""
    kind, given = _class_and_arguments(settings)
    further = {key: _as_tuple(value) for key, value in settings.args.items()}
    arguments = {"lr": settings.rate, **given, **further}
    _check_arguments(settings.name, kind, arguments)

    def build(parameters: Iterable[Tensor]) -> Optimizer:
        try:
            return kind(parameters, **arguments)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise InputError(
                f"optimizer(name={shown(settings.name)}): cannot be built with "
                f"{shown(arguments)}: {one_line(error)}."
            ) from error

    return build


def _check_arguments(
    name: str, kind: Callable[..., Optimizer], arguments: Mapping[str, Any]
) -> None:
    """Raise `InputError` for an argument that the class does not take, or lacks."""
    signature = inspect.signature(kind)
    try:
        signature.bind([], **arguments)
    except TypeError as error:
        known = [key for key in signature.parameters if key != "params"]
        raise InputError(
            f"optimizer(name={shown(name)}): {one_line(error)}; its arguments are "
            f"{', '.join(known)}."
        ) from error


def _class_and_arguments(
    settings: OptimizerConfig,
) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    if settings.name == "adamw":
        betas = (settings.momentum, 0.999)
        return AdamW, {"betas": betas, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        names = ("momentum", "weight_decay", "nesterov")
        return SGD, {name: getattr(settings, name) for name in names}
    kind = import_own(settings.name, label="optimizer.name =")
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise InputError(
            f"optimizer(name={shown(settings.name)}): is not a subclass of torch.optim.Optimizer."
        )
    return kind, {}


def _check_trial(settings: OptimizerConfig, build: Callable[[Iterable[Tensor]], Optimizer]) -> None:
    """Make one step with a small matrix, so that what cannot work fails before training."""
    example = nn.Parameter(torch.zeros(2, 2))
    example.grad = torch.zeros(2, 2)
    trial = build([example])
    try:
        trial.step()
        check_storable(trial.state_dict())
    except Exception as error:  # the class may raise anything
        raise InputError(
            f"optimizer(name={shown(settings.name)}): a trial step failed ({one_line(error)}). The "
            "trainer calls step() without a closure and stores numbers, texts and tensors."
        ) from error


def _as_tuple(value: Any) -> Any:
    """TOML has lists only; PyTorch's optimizers take tuples, as for ``betas``."""
    return tuple(value) if isinstance(value, list) else value
