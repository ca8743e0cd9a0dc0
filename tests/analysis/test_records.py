"""Finding records, and the identity of runs."""

import functools
import json
import operator
import os
import shutil

import pytest

from probmask.analysis.identity import run_identity
from probmask.analysis.records import Run, find_records, write_compact
from probmask.errors import InputError
from probmask.training.trainer import train
from training.small import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a dense twin; tests must not change it."""
    config = small(epochs=1, method__sparsity=0.9, method__scope="layer", dense_twin=True)
    return train(config, out=tmp_path_factory.mktemp("records") / "run").directory


def error(*paths):
    with pytest.raises(InputError) as caught:
        find_records(paths)
    return str(caught.value)


# Finding


def test_find_by_record_directory_or_parent(run):
    for path in (run, run.parent):
        assert [(each.method, each.path.parent.name) for each in find_records([path])] == [
            ("dense", "dense"),
            ("probmask-tied", "run"),
        ]
    (alone,) = find_records([run / "record.json"])
    assert alone.label == "probmask-tied scope=layer"
    assert alone.name == "run"
    assert (alone.sparsity, alone.seed, alone.data, alone.model) == (0.9, 0, "digits", "smallconv")
    assert alone.accuracy == json.loads((run / "record.json").read_text())["test"]["accuracy"]
    assert alone.reached == pytest.approx(0.9, abs=1e-3)


def test_a_run_counts_once(run, tmp_path):
    shutil.copy(run / "record.json", tmp_path / "elsewhere.json")
    (tmp_path / "settings.json").write_text('{"format": 1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text("{ not ours")
    found = find_records([tmp_path, run / "record.json"])
    assert [each.name for each in found] == ["elsewhere"]


def test_a_directory_without_records_adds_nothing(tmp_path):
    assert find_records([tmp_path]) == []


def test_a_missing_file_or_other_json_raises(tmp_path):
    assert "no such file or directory" in error(tmp_path / "nothing")
    (tmp_path / "other.json").write_text("{}")
    assert "not the record of a run" in error(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["record.json", "copy.json"])
def test_a_torn_record_raises(run, tmp_path, name):
    text = (run / "record.json").read_text()
    (tmp_path / name).write_text(text[: len(text) // 2])
    message = error(tmp_path)
    assert message.startswith(f"{tmp_path / name}: the record is damaged (not valid JSON: ")
    assert message.endswith("delete it or restore it from a copy.")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("seed", None, "seed = None is not a whole number, at least 0"),
        ("seed", True, "seed = True is not a whole number, at least 0"),
        ("config", [], "config = [] is not a table"),
        ("config.optimizer", 3, "config.optimizer = 3 is not a table"),
        ("method", "gmp", "method = 'gmp' is not a table"),
        ("method.name", 1, "method.name = 1 is not text"),
        ("test.accuracy", "high", "test.accuracy = 'high' is not a percentage, from 0 to 100"),
        ("test.accuracy", 100.5, "test.accuracy = 100.5 is not a percentage, from 0 to 100"),
        ("sparsity.asked", 1, "sparsity.asked = 1 is not a sparsity below 1, from 0 to 1"),
        ("size", 0, "size = 0 is not a whole number, at least 1"),
        ("kept", 2**64 - 1, None),
        ("kept", 2**64, "kept = 18446744073709551616: a whole number must fit in 64 bits"),
        ("layers.1", "stem", "layers[1] = 'stem' is not a table"),
        ("layers.0.shape", [1, "2"], "layers[0].shape[1] = '2' is not a whole number, at least 0"),
        ("history.0.histograms", {"a\x1b": []}, "history[0].histograms.a\\x1b = [] is not a table"),
        ("latency", {}, "latency.milliseconds is missing"),
        ("selection", 7, "selection = 7 is not a table"),
        ("selection", None, None),
        ("anything", [{}, "unknown", None], None),
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_raises(run, tmp_path, key, value, reason):
    record = json.loads((run / "record.json").read_text())
    *parents, last = (int(part) if part.isdigit() else part for part in key.split("."))
    functools.reduce(operator.getitem, parents, record)[last] = value
    path = tmp_path / "copy.json"
    path.write_text(json.dumps(record))
    if reason is None:
        assert len(find_records([path])) == 1
    else:
        end = "; delete it or restore it from a copy."
        assert error(path) == f"{path}: the record is damaged ({reason}){end}"


def test_a_missing_key_and_an_unknown_recipe_raise(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    del record["seed"]
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert "(seed is missing)" in error(tmp_path)
    old = {**record, "seed": 0, "format": 2, "method": {"name": "probmask", "recipe": ["tied"]}}
    (tmp_path / "record.json").write_text(json.dumps(old))
    assert "(method.recipe = ['tied'] is not one of tied, learned, paper)" in error(tmp_path)


def test_pipes_devices_and_loops_do_not_hang(run, tmp_path):
    shutil.copy(run / "record.json", tmp_path / "record.json")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "again").symlink_to(tmp_path)
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**40)
    assert len(find_records([tmp_path])) == 1
    (tmp_path / "record.json").unlink()
    os.mkfifo(tmp_path / "record.json")
    assert error(tmp_path) == f"{tmp_path / 'record.json'}: is not a regular file."
    (tmp_path / "large.json").rename(tmp_path / "record.json")
    assert "has 1,099,511,627,776 bytes, but such a file has at most" in error(tmp_path)


def test_a_record_of_a_newer_format_raises(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**record, "format": 99}))
    assert "reads formats up to" in error(tmp_path)


# Identity


def test_record_and_configuration_have_the_same_identity(run):
    config = small(epochs=1, method__sparsity=0.9, method__scope="layer", dense_twin=True)
    assert find_records([run / "record.json"])[0].identity == run_identity(config)
    twin = small(epochs=1, method={"name": "dense"})
    assert find_records([run / "dense"])[0].identity == run_identity(twin)


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 2},
        {"accelerator": "auto"},
        {"devices": 2},
        {"strategy": "ddp"},
        {"dense_twin": True},
        {"checkpoint_seconds": 1.0},
        {"workers": 3},
        {"tensorboard": True},
        {"data_dir": "/elsewhere"},
        {"data_args__validation_images": 100},  # no images are held out
        # Explicit defaults.
        {"method__scope": "global"},
        {"method__forget_by": "none"},
        {"data_args__padding": 1},
        {"data_args__mean": [0.3051]},
        {"model_args__classes": 10},
        {"optimizer__momentum": 0.9},
        {"method__freeze_at": 0.95},
        {"label_smoothing": 0},
    ],
    ids=str,
)
def test_irrelevant_settings_do_not_change_the_identity(change):
    assert run_identity(small(**change)) == run_identity(small())


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"epochs": 4},
        {"batch_size": 128},
        {"method__sparsity": 0.9},
        {"method__scope": "layer"},
        {"method__freeze_at": 0.6},
        {"method__name": "probmask"},
        {"optimizer__lr": 0.2},
        {"data_args__padding": 2},
        {"data_args__train_images": 500},
        {"model_args__width": 9},
        {"select_on": "val"},
        {"exclude": ["classifier*"]},
        {"precision": "bf16-mixed"},
        {"label_smoothing": 0.1},
    ],
    ids=str,
)
def test_relevant_settings_change_the_identity(change):
    assert run_identity(small(**change)) != run_identity(small())


def test_number_of_validation_images_changes_the_identity():
    held_out = small(select_on="val")
    assert run_identity(small(select_on="val", data_args__validation_images=100)) != run_identity(
        held_out
    )


def test_own_data_is_identified_by_the_last_part_of_its_path():
    def own(directory):
        return run_identity(small(data="folder", data_dir=directory, model="resnet14"))

    assert own("/here/birds") == own("/there/birds")
    assert own("/here/birds") != own("/here/cars")


def test_series_ignores_the_seed(run):
    record = json.loads((run / "record.json").read_text())
    first = Run(run, record)
    second = Run(run, {**record, "seed": 1, "config": {**record["config"], "seed": 1}})
    assert first.identity != second.identity
    assert first.series == second.series


def test_a_missing_setting_has_its_default(run):
    record = json.loads((run / "record.json").read_text())
    older = {key: value for key, value in record["method"].items() if key != "ramp_end"}
    assert Run(run, {**record, "method": older}).identity == Run(run, record).identity


def test_unknown_methods_are_read(run):
    record = json.loads((run / "record.json").read_text())
    own = Run(run, {**record, "method": {"name": "mine", "sparsity": 0.9, "strength": 0.5}})
    assert own.label == "mine strength=0.5"
    assert own.identity != Run(run, record).identity


# Compact copies


def test_compact_copy_has_no_paths_of_the_machine(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    record["config"] |= {"data_dir": "/home/user/data", "init": "/home/user/weights"}
    for settings in (record, record["config"]):
        settings["data_args"] = {"tokenizer": "/home/user/words"}
    write_compact(record, tmp_path / "copy.json")
    text = (tmp_path / "copy.json").read_text()
    assert "user" not in text
    assert len(text) < 0.75 * (run / "record.json").stat().st_size
    assert len(text.splitlines()) == len(record) + 2
    copy = json.loads(text)
    config = copy.pop("config")
    assert (config["data_dir"], config["init"]) == ("data", "weights")
    assert copy["data_args"] == config["data_args"] == {"tokenizer": "words"}
    (found,) = find_records([tmp_path])
    assert found.identity == Run(run, record).identity
    del record["config"]
    assert copy == {**record, "data_args": {"tokenizer": "words"}}
