"""The optimizer of a run: its settings, its defaults by name, and how it is built."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from probmask.checks import check_within, is_number
from probmask.errors import InputError
from probmask.messages import listed, one_line, shown
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
# Arguments that have a setting of their own, other than the learning rate.
_OWN_SETTINGS = {
    "sgd": ("momentum", "weight_decay", "nesterov"),
    "adamw": ("momentum", "weight_decay"),
}
_TRIAL_STEPS = 2  # the first step of SGD does not use all of its arguments
_NEEDS_OF_THE_TRAINER = (
    " The trainer calls step() without a closure and stores numbers, texts and tensors."
)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer. The learning rate warms up linearly, then follows a cosine to zero.

    Args:
        name: ``"sgd"``, ``"adamw"``, or ``"package.module:Class"`` for any other class of
            optimizer, such as ``"torch.optim:RMSprop"``.
        lr: Largest learning rate. None: 0.1 for SGD, 0.001 for AdamW. Other classes need one.
        momentum: Momentum of SGD; AdamW's β₁. None: 0.9, or the first of the ``betas`` in ``args``.
            Only for these two.
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
        self._check_args()
        if self.name == "adamw":
            self._take_momentum_from_betas()
        for name, default in _DEFAULTS.get(self.name, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        self._check_numbers()
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

    def _check_args(self) -> None:
        for name in _refused_args(self.name):
            if name in self.args:
                rule = f"{name} is a setting of its own; pass it as optimizer.{name}."
                if name == "params":
                    rule = "the trainer passes the parameters of the network; omit params."
                raise InputError(f"optimizer(args={shown(self.args)}): {rule}")

    def _take_momentum_from_betas(self) -> None:
        """Set the momentum to the first of the betas, so that both settings state the same β₁."""
        betas = self.args.get("betas")
        first: Any = betas[0] if isinstance(betas, Sequence) and betas else None
        if not is_number(first) or not 0 <= first < 1:
            return  # `build_optimizer` raises if there are wrong betas
        if self.momentum not in (None, first):
            raise InputError(
                f"optimizer(momentum={shown(self.momentum)}, args={shown(self.args)}): the "
                "momentum of AdamW is the first of its betas; omit optimizer.momentum."
            )
        object.__setattr__(self, "momentum", float(first))

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


def _refused_args(name: str) -> tuple[str, ...]:
    """Return the arguments of an optimizer that ``args`` must not contain."""
    return ("params", "lr", *_OWN_SETTINGS.get(name, ()))


def is_own_optimizer(name: str) -> bool:
    """Return whether the optimizer is neither part of probmask's settings nor of PyTorch."""
    return ":" in name and not name.startswith(_OF_PYTORCH)


def build_optimizer(settings: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of these parameters.

    Raises:
        InputError: The class cannot be imported, is not an optimizer, does not take the arguments,
            needs a closure, or has a state that a checkpoint cannot store.
    """
    parameters = list(parameters)
    build = optimizer_factory(settings)
    _check_trial(settings, build, parameters[0].device)
    optimizer = build(parameters)
    return HAM(optimizer) if settings.ham else optimizer


def optimizer_factory(settings: OptimizerConfig) -> Callable[[Iterable[Tensor]], Optimizer]:
    """Return a function that builds the optimizer, without HAM, of any parameters."""
    kind, given = _class_and_arguments(settings)
    further = {key: _as_tuple(value) for key, value in settings.args.items()}
    arguments = {"lr": settings.rate, **given, **further}
    _check_arguments(settings, kind, arguments)

    def build(parameters: Iterable[Tensor]) -> Optimizer:
        try:
            return kind(parameters, **arguments)
        except Exception as error:  # also PyTorch's classes raise errors of many types
            raise _failed(settings, "it cannot be built with these settings", error) from error

    return build


def _check_arguments(
    settings: OptimizerConfig, kind: Callable[..., Optimizer], arguments: Mapping[str, Any]
) -> None:
    """Raise `InputError` for an argument that the class does not take, or lacks."""
    signature = inspect.signature(kind)
    try:
        signature.bind([], **arguments)
    except TypeError as error:
        known = [key for key in signature.parameters if key not in _refused_args(settings.name)]
        raise InputError(
            f"{_call(settings)}: {one_line(error)}; further arguments are {', '.join(known)}."
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


def _check_trial(
    settings: OptimizerConfig,
    build: Callable[[Iterable[Tensor]], Optimizer],
    device: torch.device,
) -> None:
    """Make steps with a small matrix, so that what cannot work fails before training."""
    example = nn.Parameter(torch.zeros(2, 2, device=device))
    example.grad = torch.zeros(2, 2, device=device)
    trial = build([example])
    try:
        for _ in range(_TRIAL_STEPS):
            trial.step()
        check_storable(trial.state_dict())
    except Exception as error:  # the class may raise anything
        needs = _NEEDS_OF_THE_TRAINER if ":" in settings.name else ""
        raise _failed(settings, "a trial step failed", error, needs) from error


def _call(settings: OptimizerConfig) -> str:
    """Return what precedes the text of an error about the name and the further arguments."""
    args = f", args={shown(settings.args)}" if settings.args else ""
    return f"optimizer(name={shown(settings.name)}{args})"


def _failed(settings: OptimizerConfig, what: str, error: Exception, needs: str = "") -> InputError:
    """Return the error of an optimizer that cannot work, with the defaults of its arguments."""
    reason = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ").rstrip(".")
    text = f"{_call(settings)}: {what} ({reason})"
    known = inspect.signature(_class_and_arguments(settings)[0]).parameters
    defaults = [
        f"{name}={shown(known[name].default)}"
        for name in settings.args
        if name in known and known[name].default is not inspect.Parameter.empty
    ]
    if defaults:
        text += f"; pass values like the defaults {listed(defaults)}"
    return InputError(f"{text}.{needs}")


def _as_tuple(value: Any) -> Any:
    """TOML has lists only; PyTorch's optimizers take tuples, as for ``betas``."""
    return tuple(value) if isinstance(value, list) else value
