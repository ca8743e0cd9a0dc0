"""The configuration of a run: a TOML file, overrides, and defaults that fit the data set."""

import copy
import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from probmask.checks import check_count, check_within, is_number
from probmask.data import check_settings, with_absolute_paths
from probmask.errors import InputError
from probmask.masking.method import Method, Phase
from probmask.masking.sites import matches
from probmask.messages import lookup
from probmask.methods import METHODS
from probmask.models import MODELS, check_model_settings
from probmask.parsing import check_plain, parse, parse_toml, read_toml
from probmask.training.initial_weights import digest_of
from probmask.training.optimizer import OptimizerConfig, is_own_optimizer
from probmask.training.origins import CHECKED, Origins, reject_unknown_keys
from probmask.training.quantization import QuantizeConfig

DEFAULT_METHOD = "probmask-tied"
_DEFAULT_SPARSITY = 0.98

# Integer settings of a run: name, smallest and largest value, meaning. The largest values are
# beyond any use, and small enough for exact arithmetic with all of them.
_COUNTS = (
    ("epochs", 1, 10**9, "a number of epochs"),
    ("batch_size", 1, 10**9, "a number of examples"),
    ("seed", 0, 2**63 - 1, "a seed"),
    ("devices", 1, 10**6, "a number of devices"),
    ("threads", 1, 10**4, "a number of threads"),
    ("workers", 0, 10**4, "a number of processes"),
)
_OPTIONAL_COUNTS = ("threads", "workers")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run.

    Args:
        data: Name of the data set.
        data_dir: Directory of the data set, for data sets that are files. A relative path becomes
            absolute, so that the run can be evaluated from any working directory.
        data_args: Settings of the data set.
        select_on: Score by which runs are compared when one of them is selected. "val" holds out a
            part of the training examples, and measures the finished network on it, so that the
            test examples are used only for the final figure. "test" and "none" train on all.
        model: Name of the model, or ``package.module:function``.
        model_args: Arguments of the function that builds the model.
        init: File with the initial weights: safetensors, an artifact, or a ``state_dict`` saved
            by PyTorch; or a directory with a model.safetensors. None: random weights.
        init_sha256: SHA-256 of that file. `load_config` fills it in. A resumed run that has a
            checkpoint does not need the file.
        init_skip: Patterns of names of weights that stay random, such as the classifier's.
        include: Patterns of names of weights to mask in addition to the usual ones.
        exclude: Patterns of names of weights to leave dense. `load_config` fills in those of the
            models ``bert`` (embeddings, pooler and classifier) and ``text_encoder`` (embeddings),
            except for what ``include`` names.
        frozen: Weights that the model is built with ``requires_grad=False`` are masked, but never
            changed ("mask"), or left as they are ("skip").
        method: Name and settings of the method.
        epochs: Number of passes over the training examples.
        batch_size: Examples per update, over all devices together.
        seed: Determines all randomness.
        label_smoothing: Fraction of every label that is spread over all classes.
        optimizer: Optimizer of the weights.
        quantize: Train the weights as integers in further epochs, or None for exact weights.
        dense_twin: Also train a dense network with the same settings, for comparison.
        accelerator: Accelerator of Lightning Fabric.
        devices: Number of devices. Under ``torchrun``, its processes count instead.
        strategy: "ddp" gives every device all weights, "fsdp" divides them among the devices.
            "auto" is "ddp" for several devices.
        precision: "32-true" or "bf16-mixed".
        channels_last: Store images with the channels last, which is faster for most convolutional
            networks.
        threads: Number of CPU threads, or None for PyTorch's default.
        workers: Number of processes that read image files, or None for one per core.
        checkpoint_seconds: Seconds between checkpoints.
        timeout_seconds: Seconds after which a rank that does not respond ends the run.
        tensorboard: Write the metrics for TensorBoard too.
    """

    data: str = "digits"
    data_dir: str | None = None
    data_args: Mapping[str, Any] = field(default_factory=dict)
    select_on: Literal["val", "test", "none"] = "val"
    model: str = "smallconv"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    init_sha256: str | None = None
    init_skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    frozen: Literal["mask", "skip"] = "mask"
    method: Mapping[str, Any] = field(
        default_factory=lambda: {"name": DEFAULT_METHOD, "sparsity": _DEFAULT_SPARSITY}
    )
    epochs: int = 60
    batch_size: int = 64
    seed: int = 0
    label_smoothing: float = 0.0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    quantize: QuantizeConfig | None = None
    dense_twin: bool = False
    accelerator: str = "auto"
    devices: int = 1
    strategy: str = "auto"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    channels_last: bool = False
    threads: int | None = None
    workers: int | None = None
    checkpoint_seconds: float = 30.0
    timeout_seconds: float = 1800.0
    tensorboard: bool = True

    def __post_init__(self) -> None:
        for name in ("data_dir", "init"):
            place = getattr(self, name)
            if place and not str(place).startswith("~"):
                object.__setattr__(self, name, str(Path(place).absolute()))
        object.__setattr__(self, "data_args", with_absolute_paths(self.data, self.data_args))
        if self.init is None and (self.init_skip or self.init_sha256):
            key = "init_skip" if self.init_skip else "init_sha256"
            raise InputError(
                f"train({key}={getattr(self, key)}): has no meaning without initial weights; pass "
                "init, or omit it."
            )
        for name, least, most, meaning in _COUNTS:
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL_COUNTS:
                check_count("train", name, value, least=least, meaning=meaning)
                check_within("train", name, value, least, most, meaning=meaning)
        check_within("train", "label_smoothing", self.label_smoothing, 0, 1, meaning="a fraction")
        meaning = "a number of seconds"
        check_within(
            "train", "checkpoint_seconds", self.checkpoint_seconds, 0, math.inf, meaning=meaning
        )
        check_within("train", "timeout_seconds", self.timeout_seconds, 1, 1e9, meaning=meaning)
        if self.optimizer.warmup_epochs >= self.epochs:
            raise InputError(
                f"optimizer(warmup_epochs={self.optimizer.warmup_epochs:g}): the warm-up must be "
                f"shorter than the training of {self.epochs} epochs."
            )
        if self.batch_size % self.devices:
            raise InputError(
                f"train(batch_size={self.batch_size}, devices={self.devices}): every batch is "
                f"split evenly over the devices; choose a multiple of {self.devices}."
            )


_SMALL_IMAGES = {"model": "resnet20", "batch_size": 128}
# Defaults that depend on the data set.
_DEFAULTS_BY_DATA: dict[str, dict[str, Any]] = {
    # One thread, because a second gains little on a problem this small and costs much on a busy
    # machine. The CPU, because there the same seed gives bit-identical results.
    "digits": {"model": "smallconv", "dense_twin": True, "threads": 1, "accelerator": "cpu"},
    "cifar10": _SMALL_IMAGES,
    "cifar100": _SMALL_IMAGES,
    # The settings of the paper, taken from STR.
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
    "tsv": {
        "model": "text_encoder",
        "epochs": 10,
        "batch_size": 32,
        "optimizer": {"name": "adamw"},
    },
}


def load_config(path: str | Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> TrainConfig:
    """Read the configuration of a run from a TOML file, apply overrides, and check it.

    Args:
        path: TOML file, or None to start from the defaults.
        overrides: Pairs of a dotted key and its value, such as ``("method.sparsity", 0.9)``. Later
            pairs win over earlier ones and over the file.

    Returns:
        The complete configuration. Keys that are not given have defaults that fit the data set.

    Raises:
        InputError: The file cannot be read, a key is unknown, or a value is wrong.

    Example:
        >>> import probmask
        >>> config = probmask.load_config(None, [("data", "cifar10"), ("epochs", 3)])
        >>> config.model, config.batch_size, config.epochs
        ('resnet20', 128, 3)
    """
    table = read_toml(Path(path)) if path is not None else {}
    overridden = frozenset(key for key, _ in overrides)
    origins = Origins(None if path is None else str(path), overridden)
    return complete_config(table, overrides, origins=origins)


def complete_config(
    given: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = (), *, origins: Origins
) -> TrainConfig:
    """Fill in the defaults of the data set, then check and return the configuration."""
    table = copy.deepcopy(dict(given))
    for key, value in overrides:
        assign(table, key, value)
    data = table.get("data", TrainConfig.data)
    set_here = {key for key, _ in overrides}
    if "init" in set_here and "init_sha256" not in set_here:
        table.pop("init_sha256", None)  # of another file
    method = table.get("method")
    if isinstance(method, Mapping) and method.get("name") == "dense":
        table.setdefault("dense_twin", False)  # the twin would repeat the run
    for key, value in _defaults_of(str(data), table.get("optimizer")).items():
        table[key] = _with_defaults(table[key], value) if key in table else copy.copy(value)
    if exclude := _excluded_by_default(table):
        table.setdefault("exclude", exclude)
    if data == "imagenet" and is_number(table["epochs"]) and isinstance(table["optimizer"], dict):
        table["optimizer"].setdefault("warmup_epochs", 0.05 * table["epochs"])  # STR: 5 of 100
    return with_init_digest(parse_config(table, origins=origins))


def _excluded_by_default(table: Mapping[str, Any]) -> list[str]:
    """Return the patterns of weights that the network leaves dense, unless they are included."""
    model, include = table.get("model", TrainConfig.model), table.get("include", ())
    if not isinstance(model, str) or model not in MODELS:
        return []
    patterns = [str(each) for each in include] if isinstance(include, list | tuple) else []
    return [name for name in MODELS[model].exclude if not matches(name, patterns)]


def with_init_digest(config: TrainConfig) -> TrainConfig:
    """Fill in the digest of the initial weights, unless it is given."""
    if config.init is None or config.init_sha256 is not None:
        return config
    return replace(config, init_sha256=digest_of(config.init))


def _defaults_of(data: str, optimizer: object) -> dict[str, Any]:
    """Return the defaults of a data set. Those of its optimizer fit no other optimizer."""
    defaults = dict(_DEFAULTS_BY_DATA.get(data, {}))
    name = defaults.get("optimizer", {}).get("name", "sgd")
    if isinstance(optimizer, Mapping) and optimizer.get("name", name) != name:
        defaults["optimizer"] = {}
    return defaults


def parse_config(table: Mapping[str, Any], *, origins: Origins) -> TrainConfig:
    """Return the configuration in a mapping; raise `InputError` for unknown keys and wrong types.

    The defaults of the data set are not filled in.
    """
    table = {"data": TrainConfig.data, **table}
    method = table.get("method", {})
    if isinstance(method, Mapping):
        method = {"name": DEFAULT_METHOD, **method}
        if method["name"] != "dense":
            method.setdefault("sparsity", _DEFAULT_SPARSITY)
        table["method"] = method
    source = origins.source_of
    with origins.named():
        nested = {"optimizer": OptimizerConfig, "quantize": QuantizeConfig}
        reject_unknown_keys(table, kind=TrainConfig, nested=nested, origins=origins)
        config = parse(TrainConfig, table, prefix="", source=source)
        make_method(config, origins)
        label = origins.label("data")
        check_settings(config.data, config.data_args, naming=label, source=source)
        label = origins.label("model")
        check_model_settings(config.model, config.model_args, naming=label, source=source)
    return config


def make_method(config: TrainConfig, origins: Origins = CHECKED) -> Method:
    """Return the method that the configuration names, with its settings."""
    settings = dict(config.method)
    kind = lookup("method", origins.label("method.name"), str(settings.pop("name")), METHODS)
    return parse(kind, settings, prefix="method.", source=origins.source_of)


def phases_of(config: TrainConfig) -> tuple[Phase, ...]:
    """Return the phases of a run: those of its method, then quantization."""
    after = () if config.quantize is None else config.quantize.phases
    return (*make_method(config).phases(config.epochs), *after)


def own_code(config: TrainConfig, *, given: Collection[str] = ()) -> dict[str, str]:
    """Return the code of the user that the run imports, by the key of the configuration.

    Keys that are ``given`` on the command line, or whose table is, are omitted.
    """
    found = {}
    if ":" in config.model and "model" not in given:
        found["model"] = config.model
    set_here = "optimizer" in given or "optimizer.name" in given
    if is_own_optimizer(config.optimizer.name) and not set_here:
        found["optimizer.name"] = config.optimizer.name
    return found


def to_table(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as nested dictionaries that TOML can represent.

    TOML has no None, so keys whose value is None are omitted. In the table of the method, None is
    written as "none", because the default of such a setting may be another value.
    """
    method = {key: "none" if value is None else value for key, value in config.method.items()}
    return _without_none({**asdict(config), "method": method})


def parse_value(text: str, *, source: str = "--set") -> Any:
    """Parse a value as TOML, or as Python's True or False; any other text is a string.

    ``source`` names its origin in errors.

    Raises:
        InputError: The value is one that `check_plain` refuses.
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        table = parse_toml(f"value = {text}", source=source)
    except InputError as error:
        if not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
        table = {}
    value = table["value"] if len(table) == 1 else text
    check_plain({"value": value}, source=source)
    return value


def as_dense_twin(config: TrainConfig) -> TrainConfig:
    """Return the configuration of the dense twin: the same run without pruning and quantization."""
    return replace(config, method={"name": "dense"}, quantize=None, dense_twin=False)


def _with_defaults(given: Any, default: Any) -> Any:
    """Return the given value; if both are tables, fill in the keys that it lacks."""
    if isinstance(given, Mapping) and isinstance(default, Mapping):
        return {**default, **given}
    return given


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key of nested tables."""
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
