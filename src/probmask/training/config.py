"""The configuration of a run: a TOML file, flags on top of it, and nothing unknown."""

import copy
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from probmask.checks import check_count, check_within, is_number
from probmask.data import check_settings
from probmask.errors import InputError
from probmask.masking.method import Method
from probmask.messages import lookup
from probmask.methods import METHODS
from probmask.models import check_model_settings
from probmask.parsing import parse, read_toml
from probmask.training.origins import CHECKED, Origins, refuse_unknown_keys


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """SGD on the weights; its rate follows a cosine after a linear warm-up."""

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    warmup_epochs: float = 0.0
    clip_norm: float | None = None
    every: Literal["step", "epoch"] = "step"

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "warmup_epochs"):
            value = getattr(self, name)
            check_within("optimizer", name, value, 0, math.inf, meaning="a finite number")
        if self.clip_norm is not None:
            check_within(
                "optimizer", "clip_norm", self.clip_norm, 1e-30, math.inf, meaning="a norm"
            )
        if self.nesterov and self.momentum == 0:
            raise InputError(
                "optimizer(nesterov=True, momentum=0): Nesterov's step needs a momentum; set one."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run.

    ``method`` holds the method's name and its settings; ``model_args`` go to the function that
    builds the model, ``data_args`` are the settings of the data set. ``select_on`` says what runs
    are to be compared by when one of them is chosen: with "val" a part of the training images is
    held out and the finished network measured on it, so that the test images are left for the
    final figure; with "none" all images train. ``include`` and ``exclude`` are patterns of names
    of weights that are masked beside the usual ones, or not at all. ``batch_size`` is over all
    devices together. ``dense_twin`` trains a dense network first, under the same settings, to
    compare with. ``channels_last`` lays images out pixel by pixel, which is faster for most
    networks of convolutions but not for all. A checkpoint is written every
    ``checkpoint_seconds``, and ``workers`` processes read image files; neither has an influence on
    the result.
    """

    data: str = "digits"
    data_dir: str | None = None
    data_args: Mapping[str, Any] = field(default_factory=dict)
    select_on: Literal["val", "test", "none"] = "val"
    model: str = "smallconv"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    method: Mapping[str, Any] = field(
        default_factory=lambda: {"name": "probmask", "sparsity": 0.98}
    )
    epochs: int = 60
    batch_size: int = 64
    seed: int = 0
    label_smoothing: float = 0.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dense_twin: bool = False
    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    channels_last: bool = False
    threads: int | None = None
    workers: int | None = None
    checkpoint_seconds: float = 30.0
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0), ("devices", 1)):
            check_count("train", name, getattr(self, name), least=least, meaning=name)
        check_within("train", "label_smoothing", self.label_smoothing, 0, 1, meaning="a fraction")
        check_within(
            "train", "checkpoint_seconds", self.checkpoint_seconds, 0, math.inf, meaning="seconds"
        )
        if self.optimizer.warmup_epochs >= self.epochs:
            raise InputError(
                f"optimizer(warmup_epochs={self.optimizer.warmup_epochs:g}): the training has "
                f"{self.epochs} epochs; warm up for fewer."
            )
        if self.threads is not None:
            check_count("train", "threads", self.threads, least=1, meaning="threads")
        if self.workers is not None:
            check_count("train", "workers", self.workers, least=0, meaning="processes")
        if self.batch_size % self.devices:
            raise InputError(
                f"train(batch_size={self.batch_size}, devices={self.devices}): the batch is split "
                "evenly over the devices; choose a multiple."
            )


# The keys whose values `TrainConfig` has rules for.
_CHECKED_TOGETHER = (
    "epochs",
    "batch_size",
    "seed",
    "devices",
    "label_smoothing",
    "checkpoint_seconds",
    "optimizer",
    "threads",
    "workers",
)

_SMALL_IMAGES = {"model": "resnet20", "batch_size": 128}
# What makes sense for a data set where neither file nor flag says otherwise.
_DEFAULTS_BY_DATA: dict[str, dict[str, Any]] = {
    # One thread: on so small a problem a second gains little, and loses much on a busy machine.
    # And on the CPU, where the same seed gives the same bits.
    "digits": {"model": "smallconv", "dense_twin": True, "threads": 1, "accelerator": "cpu"},
    "cifar10": _SMALL_IMAGES,
    "cifar100": _SMALL_IMAGES,
    # The paper's settings, which are STR's.
    "imagenet": {
        "model": "resnet50",
        "epochs": 100,
        "batch_size": 256,
        "label_smoothing": 0.1,
        "optimizer": {
            "lr": 0.256,
            "momentum": 0.875,
            "weight_decay": 3.0517578125e-05,
        },
    },
    "folder": {"model": "resnet50"},
}


def load_config(path: str | Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> TrainConfig:
    """Read a TOML file, put ``key = value`` overrides on top (dotted keys), and check it all."""
    table = read_toml(Path(path)) if path is not None else {}
    over = frozenset(key for key, _ in overrides)
    return complete_config(
        table, overrides, origins=Origins(None if path is None else str(path), over)
    )


def complete_config(
    given: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = (), *, origins: Origins
) -> TrainConfig:
    """Make a configuration of what is given and of defaults that make sense for its data."""
    table = copy.deepcopy(dict(given))
    for key, value in overrides:
        assign(table, key, value)
    data = table.get("data", TrainConfig.data)
    method = table.get("method")
    if isinstance(method, Mapping) and method.get("name") == "dense":
        table.setdefault("dense_twin", False)  # it would be the same run twice
    for key, value in _DEFAULTS_BY_DATA.get(str(data), {}).items():
        table[key] = _filled_up(table[key], value) if key in table else copy.copy(value)
    if data == "imagenet" and is_number(table["epochs"]) and isinstance(table["optimizer"], dict):
        table["optimizer"].setdefault("warmup_epochs", 0.05 * table["epochs"])  # STR: 5 of 100
    return parse_config(table, origins=origins)


def parse_config(table: Mapping[str, Any], *, origins: Origins) -> TrainConfig:
    """Make a configuration of a mapping; unknown keys and wrong types are errors."""
    known = dict(table)
    refuse_unknown_keys(known, kind=TrainConfig, optimizer=OptimizerConfig, origins=origins)
    if isinstance(known.get("method", {}), Mapping):
        method = {"name": "probmask", **known.get("method", {})}
        if method["name"] != "dense":
            method.setdefault("sparsity", 0.98)
        known["method"] = method
    with origins.told(*_CHECKED_TOGETHER):
        config = parse(TrainConfig, known, prefix="", source=origins.of)
    make_method(config, origins)
    naming = origins.naming
    with origins.told("data_args"):
        check_settings(config.data, config.data_args, naming=naming("data"), source=origins.of)
    with origins.told("model_args"):
        model, settings = config.model, config.model_args
        check_model_settings(model, settings, naming=naming("model"), source=origins.of)
    return config


def make_method(config: TrainConfig, origins: Origins = CHECKED) -> Method:
    """The method that the configuration names, with its settings."""
    settings = dict(config.method)
    kind = lookup("method", origins.naming("method.name"), str(settings.pop("name")), METHODS)
    with origins.told("method"):
        return parse(kind, settings, prefix="method.", source=origins.of)


def to_table(config: TrainConfig) -> dict[str, Any]:
    """The configuration as plain nested dictionaries; None is left out, as TOML has none.

    Among the method's settings it is spelt "none": its default may be something else.
    """
    method = {key: "none" if value is None else value for key, value in config.method.items()}
    return _without_none({**asdict(config), "method": method})


def parse_value(text: str) -> Any:
    """Read a value as TOML would, or as Python its True and False; all else is a string."""
    if text in ("True", "False"):
        return text == "True"
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def as_dense_twin(config: TrainConfig) -> TrainConfig:
    """The same run with nothing removed."""
    return replace(config, method={"name": "dense"}, dense_twin=False)


def _filled_up(given: Any, default: Any) -> Any:
    """What is given, and of a table also the defaults of those keys that are not."""
    if isinstance(given, Mapping) and isinstance(default, Mapping):
        return {**default, **given}
    return given


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a key of nested tables, which its dots lead through."""
    *parents, last = dotted.split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {dotted}: {parent} is a value, not a table.")
    table[last] = value


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in table.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _without_none(value)
    return list(value) if isinstance(value, tuple) else value
