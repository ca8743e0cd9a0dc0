"""The configuration: precedence of sources, errors, and the written form."""

import itertools
import tomllib

import pytest
import tomli_w

from probmask.errors import InputError
from probmask.methods import TiedProbMask
from probmask.training.config import (
    OptimizerConfig,
    TrainConfig,
    as_dense_twin,
    load_config,
    make_method,
    parse_config,
    parse_value,
    to_table,
)
from probmask.training.origins import Origins


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(table, **arguments):
    with pytest.raises(InputError) as caught:
        parse_config(table, origins=Origins("run.toml"), **arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_default_is_digits_at_98_percent_with_a_dense_twin():
    config = load_config(None)
    assert (config.data, config.model, config.dense_twin) == ("digits", "smallconv", True)
    assert config.method == {"name": "probmask-tied", "sparsity": 0.98}


def test_later_overrides_win_over_earlier_ones_and_over_the_file(tmp_path):
    text = "epochs = 5\nseed = 3\n[optimizer]\nlr = 0.2\nmomentum = 0.5\n[method]\nsparsity = 0.5\n"
    overrides = [("epochs", 2), ("method.sparsity", 0.7), ("epochs", 1), ("optimizer.lr", 0.3)]
    config = load_config(written(tmp_path, text), overrides)
    assert (config.epochs, config.seed, config.method["sparsity"]) == (1, 3, 0.7)
    assert config.optimizer == OptimizerConfig(lr=0.3, momentum=0.5)


def test_the_file_wins_over_the_defaults_of_the_data_set(tmp_path):
    assert load_config(written(tmp_path, 'data = "digits"')).dense_twin
    assert not load_config(written(tmp_path, "dense_twin = false")).dense_twin


@pytest.mark.parametrize(
    ("table", "key", "meant"),
    [
        ({"epoch": 3}, "epoch", "epochs"),
        ({"optimiser": {}}, "optimiser", "optimizer"),
        ({"optimizer": {"momentm": 0.9}}, "optimizer.momentm", "momentum"),
        ({"method": {"sparcity": 0.9}}, "method.sparcity", "sparsity"),
        ({"method": {"temperature_begin": 1.0}}, "method.temperature_begin", "temperature_end"),
    ],
)
def test_an_unknown_key_raises_with_a_suggestion(table, key, meant):
    assert refused(table) == f"run.toml: unknown key {key}; did you mean {meant!r}?"


def test_an_unknown_key_without_a_similar_one_lists_all():
    message = refused({"optimizer": {"zzz": 1}})
    assert (
        "unknown key optimizer.zzz; choose from args, clip_norm, every, ham, lr, momentum"
        in message
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"epochs": "many"}, "epochs = 'many': expected a whole number."),
        ({"epochs": 2.0}, "epochs = 2.0: expected a whole number."),
        ({"epochs": True}, "epochs = True: expected a whole number."),
        ({"model": 5}, "model = 5: expected text."),
        ({"dense_twin": "yes"}, "dense_twin = 'yes': expected true or false."),
        ({"label_smoothing": "x"}, "label_smoothing = 'x': expected a number."),
        ({"label_smoothing": True}, "label_smoothing = True: expected a number."),
        ({"precision": "fp8"}, "precision = 'fp8': expected '32-true' or 'bf16-mixed'."),
        ({"precision": ["32-true"]}, "expected '32-true' or 'bf16-mixed'."),
        ({"model_args": 3}, "model_args = 3: expected a table."),
        ({"optimizer": 0.1}, "optimizer must be a table, not 0.1."),
        ({"optimizer": {"lr": "fast"}}, "optimizer.lr = 'fast': expected a number."),
        ({"optimizer": {"every": "day"}}, "optimizer.every = 'day': expected 'step' or 'epoch'."),
        ({"method": "probmask"}, "method = 'probmask': expected a table."),
        ({"method": {"min_keep_per_layer": 1.5}}, "= 1.5: expected a whole number."),
        ({"method": {"scope": "world"}}, "method.scope = 'world': expected 'global' or 'layer'."),
        ({"method": {"name": "probmask", "compat": "x"}}, "compat = 'x': expected 'official'."),
        ({"threads": "two"}, "threads = 'two': expected a whole number."),
    ],
)
def test_a_value_of_the_wrong_type_raises(table, expected):
    message = refused(table)
    assert message.startswith("run.toml: ")
    assert message.endswith(expected)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"epochs": 0}, "epochs = 0: must be a number of epochs, an integer of at least 1"),
        ({"epochs": -3}, "epochs = -3:"),
        ({"seed": -1}, "seed = -1:"),
        ({"batch_size": 0}, "batch_size = 0:"),
        ({"devices": 0}, "devices = 0:"),
        ({"devices": 2, "batch_size": 63}, "batch_size = 63, devices = 2: .*choose a multiple"),
        ({"label_smoothing": 1.5}, "label_smoothing = 1.5:"),
        ({"label_smoothing": float("nan")}, "label_smoothing = nan:"),
        ({"threads": 0}, "threads = 0: must be a number of threads"),
        ({"checkpoint_seconds": -1}, "must be a number of seconds, at least 0"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds"),
        ({"optimizer": {"lr": -0.1}}, "lr"),
        ({"optimizer": {"lr": float("nan")}}, "lr"),
        ({"optimizer": {"momentum": -0.9}}, "momentum"),
        ({"optimizer": {"weight_decay": -1e-4}}, "weight_decay"),
        ({"optimizer": {"nesterov": True, "momentum": 0.0}}, "nesterov"),
        ({"optimizer": {"name": "adam"}}, "name"),
        ({"optimizer": {"name": "adamw", "lr": 0.1}}, "AdamW moves every weight by about lr"),
        ({"optimizer": {"name": "adam"}}, "package.module:Class"),
        ({"optimizer": {"name": "torch.optim:Adam"}}, "no default learning rate"),
        (
            {"optimizer": {"name": "torch.optim:Adam", "lr": 0.1, "momentum": 0.5}},
            "optimizer.args = { momentum = … }",
        ),
        ({"optimizer": {"args": {"lr": 0.1}}}, "a setting of its own; pass it as optimizer.lr"),
        ({"optimizer": {"args": {"params": []}}}, "omit params"),
        *(
            ({"optimizer": {"name": name, "args": {key: 0.5}}}, f"pass it as optimizer.{key}")
            for name, keys in (
                ("sgd", ("momentum", "weight_decay", "nesterov")),
                ("adamw", ("momentum", "weight_decay")),
            )
            for key in keys
        ),
        (
            {"optimizer": {"name": "adamw", "momentum": 0.9, "args": {"betas": [0.8, 0.98]}}},
            "omit optimizer.momentum",
        ),
        ({"optimizer": {"name": "adamw", "lr": 0.001, "nesterov": True}}, "nesterov"),
        ({"optimizer": {"name": "adamw", "lr": 0.001, "momentum": 1.0}}, "β₁"),
        ({"optimizer": {"warmup_epochs": -1}}, "warmup_epochs"),
        ({"optimizer": {"clip_norm": 0}}, "clip_norm"),
        ({"optimizer": {"lr": 1e39}}, "optimizer.lr = 1e.39: must be a number, from 0 to 1e.38"),
        ({"optimizer": {"weight_decay": float("inf")}}, "weight_decay = inf:"),
        *(
            ({key: value}, rf"{key} = 1.*{number}.*: must be a number of")
            for key in ("epochs", "batch_size", "devices", "threads", "workers")
            for value, number in ((10**12, 0), (10**4000, "…"))
        ),
        ({"seed": 2**63}, "seed = 9223372036854775808: must be a seed, less than"),
    ],
    ids=itertools.count(),
)
def test_a_value_out_of_range_raises(table, expected):
    with pytest.raises(InputError, match=expected):
        parse_config(table, origins=Origins("run.toml"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sparsity": 98}, "for 98 % pass 0.98"),
        ({"sparsity": -0.1}, "fraction pruned"),
        ({"name": "probmask", "draws": 0}, "method.draws = 0:"),
        ({"ramp_begin": 0.9, "ramp_end": 0.1}, "method.ramp_begin = 0.9, method.ramp_end = 0.1: "),
        ({"name": "probmsk"}, "no such method; did you mean 'probmask'"),
        ({"name": "dense", "sparsity": 0.5}, "dense training prunes nothing"),
    ],
)
def test_settings_of_the_method_are_checked_on_load(settings, expected):
    assert expected in refused({"method": settings})


def test_the_method_gets_its_settings():
    method = make_method(
        parse_config({"method": {"sparsity": 0.9, "outside": 0.3}}, origins=Origins("x"))
    )
    assert method == TiedProbMask(sparsity=0.9, outside=0.3)


def test_an_integer_is_accepted_for_a_float():
    config = parse_config({"optimizer": {"lr": 1}, "method": {"sparsity": 0}}, origins=Origins("x"))
    assert (config.optimizer.lr, config.method["sparsity"]) == (1.0, 0)
    assert isinstance(config.optimizer.lr, float)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [("model_args.width", 8), ("model_args.classes", 7), ("method.name", "dense")],
        [("method.name", "probmask"), ("method.compat", "official"), ("optimizer.clip_norm", 2)],
        [("threads", 1), ("data_dir", 'we "quote" \\ and ü'), ("label_smoothing", 0.1)],
        [("optimizer.lr", 0.1 + 0.2), ("checkpoint_seconds", 1e-9), ("seed", 2**62)],
    ],
)
def test_a_written_configuration_is_read_back_equal(tmp_path, overrides):
    if ("method.name", "dense") in overrides:
        overrides = [*overrides, ("method.sparsity", 0.0)]
    config = load_config(None, overrides)
    path = written(tmp_path, tomli_w.dumps(to_table(config)))
    assert load_config(path) == config


def test_a_setting_of_none_survives_toml(tmp_path):
    """TOML has no None, and the default of STR's `freeze_at` is another value."""
    settings = {"name": "str", "sparsity": 0.9, "freeze_at": None}
    config = TrainConfig(method=settings)
    path = written(tmp_path, tomli_w.dumps(to_table(config)))
    assert make_method(load_config(path)) == make_method(config)


@pytest.mark.parametrize("text", ["epochs = ", "epochs = 1\nepochs = 2", "[a\n", "x = \x00"])
def test_invalid_toml_raises_one_line_with_the_file_name(tmp_path, text):
    path = written(tmp_path, text)
    with pytest.raises(InputError, match=r"run\.toml: not valid TOML: ") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_binary_file_raises(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid TOML"):
        load_config(path)


@pytest.mark.parametrize("name", ["nowhere.toml", "."])
def test_an_unreadable_file_raises(tmp_path, name):
    with pytest.raises(InputError, match="cannot be read: "):
        load_config(tmp_path / name)


def test_an_override_inside_a_plain_value_raises(tmp_path):
    with pytest.raises(InputError, match=r"seed\.x: seed is a value, not a table"):
        load_config(written(tmp_path, "seed = 1"), [("seed.x", 1)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("true", True),
        ("False", False),
        ("ddp", "ddp"),
        ('"5"', "5"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_values_of_set_are_parsed_as_toml(text, value):
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


@pytest.mark.parametrize("text", ["", "1\nseed = 7", "a b", "2026-13-45", "{"])
def test_a_value_that_is_not_toml_is_text(text):
    assert parse_value(text) == text


def test_only_the_method_of_the_dense_twin_differs():
    config = load_config(None, [("epochs", 2), ("model_args.width", 8)])
    ours, twins = to_table(config), to_table(as_dense_twin(config))
    assert twins["method"] == {"name": "dense"}
    changed = {key for key in ours if ours[key] != twins[key]}
    assert changed == {"method", "dense_twin"}


def test_the_table_is_plain_toml():
    table = to_table(load_config(None))
    assert tomllib.loads(tomli_w.dumps(table)) == table
