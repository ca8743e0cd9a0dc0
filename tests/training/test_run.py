"""A run from start to record: its files, its record, and reproducibility."""

import importlib.metadata
import json
import math
import os

import numba
import pytest
import torch

from probmask.artifact import load, load_state, read
from probmask.data import load_data
from probmask.errors import InputError
from probmask.methods import TiedProbMask
from probmask.training.config import TrainConfig, load_config
from probmask.training.evaluation import Score, evaluate_model
from probmask.training.metrics import thin_history
from probmask.training.progress import Bar
from probmask.training.record import versions
from probmask.training.run import TrainingRun
from probmask.training.trainer import default_directory, train
from training.small import METHOD_OF_FORM, SIZE, small, snapshot

# MACs per weight of smallconv on 8 by 8 images: two layers at 8 by 8, two at 4 by 4, a linear one.
MACS = [64, 64, 16, 16, 1]
SIZES = [72, 576, 1152, 2304, 160]


def metrics(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def artifact(directory):
    return (directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a dense twin and TensorBoard."""
    out = tmp_path_factory.mktemp("runs") / "deep" / "run"
    config = small(epochs=4, dense_twin=True, tensorboard=True, method__sparsity=0.9)
    return config, train(config, out=out)


def test_a_run_of_a_larger_machine_uses_the_threads_that_exist(tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    train(small(threads=10_000), out=tmp_path / "run")
    assert max(used) == os.cpu_count()


def test_the_record_has_the_totals_of_the_whole_network_too(tmp_path):
    config = small(exclude=["features.3"], method__sparsity=0.9)
    record = train(config, out=tmp_path / "run").record
    masked = SIZE - SIZES[1]
    keep = masked - round(0.9 * masked)
    assert (record["size"], record["kept"]) == (masked, keep)
    network = record["network"]
    assert (network["size"], network["kept"]) == (SIZE, keep + SIZES[1])
    assert network["sparsity"] == 1 - network["kept"] / SIZE


@pytest.mark.parametrize("method", ["probmask-tied", "edge-popup"])  # which freezes all weights
@pytest.mark.parametrize(("frozen", "masked"), [("mask", SIZE), ("skip", SIZE - SIZES[0])])
def test_frozen_weights_are_masked_or_skipped(method, frozen, masked, tmp_path):
    config = small(
        model="training.small:partly_frozen",
        frozen=frozen,
        method__name=method,
        method__sparsity=0.5,
    )
    outcome = train(config, out=tmp_path / "run")
    assert (outcome.record["size"], outcome.record["network"]["size"]) == (masked, SIZE)
    first = next(iter(load_state(tmp_path / "run" / "model.safetensors").values()))
    assert bool((first == 0).any()) == (frozen == "mask")


def test_the_record_has_the_sparsity_asked_and_reached(run):
    _, outcome = run
    record = outcome.record
    keep = SIZE - round(0.9 * SIZE)
    assert (record["size"], record["kept"]) == (SIZE, keep)
    assert record["network"] == {"kept": keep, "size": SIZE, "sparsity": 1 - keep / SIZE}
    assert record["sparsity"] == {"asked": 0.9, "reached": 1 - keep / SIZE}
    assert record["updates"] == 4 * (1442 // 256)
    assert record["config"]["method"] == {"name": "probmask-tied", "sparsity": 0.9}
    settings = TiedProbMask(sparsity=0.9).full_settings()
    assert record["method"] == settings | {"name": "probmask-tied"}
    assert record["seconds"] > 0
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["numba"] == numba.__version__
    assert record["hardware"]["threads"] == 1


def test_versions_omit_numba_if_it_is_not_installed(monkeypatch):
    def find(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find)
    assert list(versions()) == ["probmask", "torch", "numpy", "python"]


def test_the_record_has_the_history_with_histograms(tmp_path, form):
    outcome = train(small(epochs=4, method__name=METHOD_OF_FORM[form]), out=tmp_path / "run")
    lines = (outcome.directory / "metrics.jsonl").read_text().splitlines()
    assert outcome.record["history"] == [json.loads(line) for line in lines]
    counts = [
        line["histograms"]["prob"]["counts"]
        for line in outcome.record["history"]
        if "histograms" in line
    ]
    assert 0 < len(counts) < 4  # not once the mask is frozen
    assert all(sum(count) == SIZE for count in counts)


def test_a_long_history_is_thinned():
    history = thin_history([f'{{"epoch": {epoch}}}' for epoch in range(1, 251)])
    assert [line["epoch"] for line in history] == list(range(1, 251, 3))
    assert thin_history([]) == []


def test_the_history_includes_the_last_histogram_of_each_name():
    shown = {41: ["once"], 3: ["often"], 4: ["often"], 5: ["often", "twice"], 6: ["twice"]}
    lines = []
    for epoch in range(1, 1001):
        names = shown.get(epoch)
        more = {"histograms": {name: {} for name in names}} if names else {}
        lines.append(json.dumps({"epoch": epoch, **more}))
    history = thin_history(lines)
    epochs = [line["epoch"] for line in history]
    assert epochs == sorted(set(epochs))
    assert {5, 6, 41, 1000} <= set(epochs)
    assert len(epochs) == 103
    assert [line["epoch"] for line in history if "histograms" in line] == [5, 6, 41]


def test_the_record_counts_weights_and_macs_per_layer(run):
    record = run[1].record
    layers = record["layers"]
    assert [layer["size"] for layer in layers] == SIZES
    assert [layer["macs_per_weight"] for layer in layers] == MACS
    assert sum(layer["kept"] for layer in layers) == record["kept"]
    for layer in layers:
        assert math.prod(layer["shape"]) == layer["size"]
        assert layer["sparsity"] == 1 - layer["kept"] / layer["size"]
    assert record["macs"]["dense"] == sum(m * n for m, n in zip(MACS, SIZES, strict=True))
    assert record["macs"]["sparse"] == sum(
        m * layer["kept"] for m, layer in zip(MACS, layers, strict=True)
    )


def test_the_artifact_has_exactly_the_recorded_number_of_weights(run):
    _, outcome = run
    state = load_state(outcome.directory / "model.safetensors")
    for layer in outcome.record["layers"]:
        assert int(state[layer["name"]].count_nonzero()) == layer["kept"]
    assert not any("parametrizations" in name for name in state)
    assert outcome.record["bytes"] == len(artifact(outcome.directory))


def test_the_artifact_has_the_recorded_accuracy(run):
    _, outcome = run
    test = outcome.record["test"]
    assert test["accuracy"] == 100 * test["correct"] / test["total"]
    assert test["total"] == 355
    score = evaluate_model(load(outcome.directory / "model.safetensors"), load_data("digits"))
    assert (score.correct, score.total) == (test["correct"], test["total"])
    assert read(outcome.directory / "model.safetensors").metadata["test"] == test


def test_the_directory_has_the_documented_files_only(run):
    config, outcome = run
    files = {"config.toml", "metrics.jsonl", "model.safetensors", "record.json", "tensorboard"}
    found = {path.name for path in outcome.directory.iterdir()}
    assert found - {".lock"} == files | {"dense"}
    assert {path.name for path in (outcome.directory / "dense").iterdir()} - {".lock"} == files
    assert load_config(outcome.directory / "config.toml") == config
    written = json.loads((outcome.directory / "record.json").read_text())
    assert written == outcome.record


def test_the_log_has_one_line_per_epoch(run):
    for directory in (run[1].directory, run[1].directory / "dense"):
        log = metrics(directory)
        assert [line["epoch"] for line in log] == [1, 2, 3, 4]
        assert [line["step"] for line in log] == [5, 10, 15, 20]
        assert all(line["loss"] > 0 and 0 <= line["train_accuracy"] <= 100 for line in log)
    log = metrics(run[1].directory)
    assert log[-1]["expected_sparsity"] == pytest.approx(0.9, abs=1e-3)
    assert log[-1]["forgotten"] == 1
    temperatures = [line["temperature"] for line in log]
    assert temperatures == sorted(temperatures, reverse=True)


def test_tensorboard_has_the_same_numbers(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run[1].directory / "tensorboard"))
    board.Reload()
    losses = [(event.step, event.value) for event in board.Scalars("loss")]
    expected = [(line["step"], line["loss"]) for line in metrics(run[1].directory)]
    assert [step for step, _ in losses] == [step for step, _ in expected]
    assert [v for _, v in losses] == pytest.approx([v for _, v in expected], rel=1e-6)


def test_the_dense_twin_is_the_run_with_the_method_dense(run, tmp_path):
    _, outcome = run
    assert outcome.dense is not None
    assert outcome.dense["kept"] == outcome.dense["size"] == SIZE
    assert outcome.dense["macs"]["sparse"] == outcome.dense["macs"]["dense"]
    config = small(epochs=4, method={"name": "dense"})
    alone = train(config, out=tmp_path / "alone")
    assert alone.dense is None
    assert artifact(alone.directory) == artifact(outcome.directory / "dense")


def test_logging_and_checkpoints_do_not_change_the_result(run, tmp_path):
    _, outcome = run
    config = small(epochs=4, method__sparsity=0.9, checkpoint_seconds=0)
    torch.manual_seed(12345)
    again = train(config, out=tmp_path / "again")
    assert artifact(again.directory) == artifact(outcome.directory)
    assert metrics(again.directory) == metrics(outcome.directory)
    assert not (tmp_path / "again" / "checkpoint.safetensors").exists()


def test_another_seed_gives_another_network(run, tmp_path):
    config = small(epochs=4, method__sparsity=0.9, seed=1)
    other = load_state(train(config, out=tmp_path / "other").directory / "model.safetensors")
    ours = load_state(run[1].directory / "model.safetensors")
    masks = [(ours[name] != 0, other[name] != 0) for name in ours if ours[name].dim() > 1]
    assert not any(torch.equal(a, b) for a, b in masks)


@pytest.mark.parametrize(
    ("every", "position"), [("step", [4 / 15, 9 / 15, 14 / 15]), ("epoch", [0, 1 / 3, 2 / 3])]
)
def test_the_learning_rate_follows_a_cosine(tmp_path, every, position):
    config = small(method={"name": "dense"}, optimizer__lr=0.2, optimizer__every=every)
    rates = [line["learning_rate"] for line in metrics(train(config, out=tmp_path / "r").directory)]
    assert rates == pytest.approx([0.1 * (1 + math.cos(math.pi * t)) for t in position])


def test_the_learning_rate_warms_up_linearly(tmp_path):
    config = small(method={"name": "dense"}, optimizer__lr=0.2, optimizer__warmup_epochs=2)
    rates = [line["learning_rate"] for line in metrics(train(config, out=tmp_path / "r").directory)]
    factors = [0.5, 1, 1]
    cosines = [0.1 * (1 + math.cos(math.pi * t / 15)) for t in (4, 9, 14)]
    assert rates == pytest.approx([f * c for f, c in zip(factors, cosines, strict=True)])


def test_full_label_smoothing_leaves_nothing_to_learn(tmp_path):
    config = small(method={"name": "dense"}, label_smoothing=1.0)
    losses = [line["loss"] for line in metrics(train(config, out=tmp_path / "r").directory)]
    assert all(loss >= math.log(10) - 1e-6 for loss in losses)
    assert losses[-1] < math.log(10) + 0.2


def test_a_tiny_clip_norm_stops_the_weights(tmp_path):
    settings = {"method": {"name": "dense"}, "optimizer__weight_decay": 0.0}
    states = [
        load_state(train(config, out=tmp_path / name).directory / "model.safetensors")
        for name, config in (
            ("short", small(**settings, epochs=1, optimizer__clip_norm=1e-9)),
            ("long", small(**settings, epochs=2, optimizer__clip_norm=1e-9)),
            ("free", small(**settings, epochs=1)),
        )
    ]
    short, long, free = (state["features.3.weight"] for state in states)
    assert (short - long).abs().max() < 1e-6
    assert (short - free).abs().max() > 1e-3


def test_bf16_trains_another_network_with_the_same_budget(run, tmp_path):
    config = small(epochs=4, method__sparsity=0.9, precision="bf16-mixed")
    outcome = train(config, out=tmp_path / "bf16")
    assert outcome.record["kept"] == run[1].record["kept"]
    assert artifact(outcome.directory) != artifact(run[1].directory)
    assert {row.dtype for row in read(outcome.directory / "model.safetensors").tensors} == {
        "F32",
        "I64",
    }
    score = evaluate_model(load(outcome.directory / "model.safetensors"), load_data("digits"))
    assert score.correct == outcome.record["test"]["correct"]


@pytest.mark.parametrize(
    "settings",
    [
        {"scope": "layer"},
        {"forget_by": 0.0, "freeze_at": 0.7},
        {"freeze_at": 1.0, "every": "epoch"},
        {"name": "probmask"},
        {"name": "probmask", "draws": 2},
        {"name": "probmask", "scope": "layer"},
        {"name": "probmask", "compat": "official"},
        {"name": "probmask", "train_weights": False},
    ],
)
def test_the_probmask_family_ends_at_exactly_the_budget(run, tmp_path, settings):
    overrides = {f"method__{key}": value for key, value in settings.items()}
    outcome = train(small(epochs=4, method__sparsity=0.9, **overrides), out=tmp_path / "r")
    assert outcome.record["kept"] == run[1].record["kept"]
    assert artifact(outcome.directory) != artifact(run[1].directory)


def test_a_budget_in_flops_is_met_and_recorded(tmp_path, form):
    config = small(method__sparsity=0.5, method__cost="flops", method__name=METHOD_OF_FORM[form])
    record = train(config, out=tmp_path / "r").record
    macs = record["macs"]
    assert 0.499 * macs["dense"] <= macs["sparse"] <= 0.5 * macs["dense"]
    # "asked" is a fraction of FLOPs, so "reached" must be one too.
    assert record["sparsity"]["reached"] == pytest.approx(record["sparsity"]["asked"], abs=5e-3)


def test_training_learns(tmp_path, form):
    config = small(
        epochs=8, batch_size=128, method__sparsity=0.5, method__name=METHOD_OF_FORM[form]
    )
    assert train(config, out=tmp_path / "r").record["test"]["accuracy"] > 70


def test_a_directory_in_use_raises_and_stays_unchanged(run):
    config, outcome = run
    before = snapshot(outcome.directory)
    with pytest.raises(InputError, match="is already in use; choose another, or pass --resume"):
        train(config, out=outcome.directory)
    assert snapshot(outcome.directory) == before


def test_an_empty_directory_is_accepted(tmp_path):
    assert train(small(epochs=1), out=tmp_path).directory == tmp_path


def test_train_without_a_configuration_uses_the_defaults(tmp_path, monkeypatch):
    """The default is the demo: the digits at 98 % sparsity, with a dense twin."""
    monkeypatch.setattr(TrainConfig, "epochs", 1)
    seen = []
    monkeypatch.setattr(TrainingRun, "complete", lambda run, *_: seen.append(run.config) or {})
    train(out=tmp_path / "new")
    assert len(seen) == 2  # the dense twin and the run
    assert seen[-1].method == {"name": "probmask-tied", "sparsity": 0.98}


def test_the_default_directory_is_an_unused_one_under_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small(epochs=1)
    first, second = train(config).directory, train(config).directory
    assert first == default_directory(config)
    assert str(first) == "runs/digits-smallconv-probmask-tied-0.98-seed0"
    assert str(second) == "runs/digits-smallconv-probmask-tied-0.98-seed0-2"


@pytest.mark.parametrize(
    "overrides",
    [
        {"model": "smalconv"},
        {"model": "no_such_module:build"},
        {"model_args.widht": 8},
        {"data": "digit"},
        {"batch_size": 1443},
        {"accelerator": "abacus"},
        {"strategy": "chaos"},
        {"method.min_keep_per_layer": 1000},
    ],
)
def test_wrong_input_raises_before_anything_is_created(tmp_path, overrides):
    given = {key.replace(".", "__"): value for key, value in overrides.items()}
    with pytest.raises(InputError) as caught:
        train(small(**given), out=tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == {}


def test_a_batch_larger_than_the_data_raises(tmp_path):
    with pytest.raises(InputError, match=r"train\(batch_size=1443\): digits has 1442 "):
        train(small(batch_size=1443), out=tmp_path / "out")


@pytest.mark.parametrize("method", [{"name": "probmask"}, {"name": "dense"}])
def test_diverging_training_raises(tmp_path, method):
    """The accuracy of a network of NaN is not a result."""
    config = small(method=method, optimizer__lr=1e30)
    with pytest.raises(Exception, match=r"(?i)nan|finite|infinit") as caught:
        train(config, out=tmp_path / "r")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "r" / "record.json").exists()


def test_the_bar_shows_epoch_loss_and_sparsity(tmp_path, capfd):
    config = small(epochs=2, method__min_keep_per_layer=1)
    train(config, out=tmp_path / "r", make_reporter=Bar)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "probmask" in shown.err
    assert "epoch 2/2 loss" in shown.err
    assert "sparsity" in shown.err


def test_evaluation_restores_the_mode_of_the_model():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    data = load_data("digits")
    model.train()
    score = evaluate_model(model, data)
    assert model.training
    assert score.total == 355
    assert score == evaluate_model(model.eval(), data)
    assert not model.training
    assert Score(1, 8).accuracy == 12.5
