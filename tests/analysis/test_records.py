"""Records: found wherever they lie, and known by what decided the run."""

import json
import shutil

import pytest

from probmask.analysis.identity import run_identity
from probmask.analysis.records import Run, find_records, write_compact
from probmask.errors import InputError
from probmask.training.run import train
from training.small import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with a dense twin; nobody may change it."""
    config = small(epochs=1, method__sparsity=0.9, method__scope="layer", dense_twin=True)
    return train(config, out=tmp_path_factory.mktemp("records") / "run").directory


def refused(*paths):
    with pytest.raises(InputError) as caught:
        find_records(paths)
    return str(caught.value)


# Finding


def test_a_run_is_found_by_its_record_its_directory_and_any_directory_above(run):
    for path in (run, run.parent):
        assert [(each.method, each.path.parent.name) for each in find_records([path])] == [
            ("dense", "dense"),
            ("probmask", "run"),
        ]
    (alone,) = find_records([run / "record.json"])
    assert alone.label == "probmask scope=layer"
    assert alone.name == "run"
    assert (alone.sparsity, alone.seed, alone.data, alone.model) == (0.9, 0, "digits", "smallconv")
    assert alone.accuracy == json.loads((run / "record.json").read_text())["test"]["accuracy"]
    assert alone.reached == pytest.approx(0.9, abs=1e-3)


def test_the_same_run_counts_once_wherever_it_lies(run, tmp_path):
    shutil.copy(run / "record.json", tmp_path / "elsewhere.json")
    (tmp_path / "settings.json").write_text('{"format": 1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "broken.json").write_text("{ not ours")
    found = find_records([tmp_path, run / "record.json"])
    assert [each.name for each in found] == ["elsewhere"]


def test_a_directory_without_records_adds_nothing(tmp_path):
    assert find_records([tmp_path]) == []


def test_what_is_not_there_or_no_record_is_refused(tmp_path):
    assert "no such file or directory" in refused(tmp_path / "nothing")
    (tmp_path / "other.json").write_text("{}")
    assert "not the record of a run" in refused(tmp_path / "other.json")


@pytest.mark.parametrize("name", ["record.json", "copy.json"])
@pytest.mark.parametrize("damage", ["torn", "no seed", "accuracy", "method", "config"])
def test_a_damaged_record_is_named(run, tmp_path, name, damage):
    text = (run / "record.json").read_text()
    record = json.loads(text)
    if damage == "no seed":
        del record["seed"]
    elif damage == "accuracy":
        record["test"]["accuracy"] = "high"
    elif damage in ("method", "config"):
        record[damage] = []
    path = tmp_path / name
    path.write_text(text[: len(text) // 2] if damage == "torn" else json.dumps(record))
    message = refused(tmp_path)
    assert message.startswith(f"{path}: the record is damaged (")
    assert message.endswith("delete it or restore it from a copy.")


def test_a_record_of_a_newer_version_is_refused(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    (tmp_path / "record.json").write_text(json.dumps({**record, "format": 99}))
    assert "reads formats up to" in refused(tmp_path)


# Identity


def test_a_record_has_the_identity_that_its_configuration_foretold(run):
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
        {"data_args__validation_images": 100},  # of which none is held out
        # Defaults, said aloud.
        {"method__scope": "global"},
        {"method__prob_lr": "none"},
        {"data_args__padding": 1},
        {"data_args__mean": [0.3051]},
        {"model_args__classes": 10},
        {"optimizer__momentum": 0.9},
        {"method__freeze_at": "none"},
        {"label_smoothing": 0},
    ],
    ids=str,
)
def test_what_does_not_decide_the_result_makes_no_other_run(change):
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
        {"method__recipe": "learned"},
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
def test_whatever_decides_the_result_makes_another_run(change):
    assert run_identity(small(**change)) != run_identity(small())


def test_how_many_are_held_out_makes_another_run():
    held_out = small(select_on="val")
    assert run_identity(small(select_on="val", data_args__validation_images=100)) != run_identity(
        held_out
    )


def test_own_data_is_known_by_the_last_part_of_its_path():
    def own(place):
        return run_identity(small(data="folder", data_dir=place, model="resnet14"))

    assert own("/here/birds") == own("/there/birds")
    assert own("/here/birds") != own("/here/cars")


def test_runs_that_differ_in_their_seeds_only_are_one_series(run):
    record = json.loads((run / "record.json").read_text())
    first = Run(run, record)
    second = Run(run, {**record, "seed": 1, "config": {**record["config"], "seed": 1}})
    assert first.identity != second.identity
    assert first.series == second.series


def test_a_setting_that_is_newer_than_a_record_has_its_default_there(run):
    record = json.loads((run / "record.json").read_text())
    older = {key: value for key, value in record["method"].items() if key != "draws"}
    assert Run(run, {**record, "method": older}).identity == Run(run, record).identity


def test_a_method_that_is_not_known_here_is_still_a_run(run):
    record = json.loads((run / "record.json").read_text())
    own = Run(run, {**record, "method": {"name": "mine", "sparsity": 0.9, "strength": 0.5}})
    assert own.label == "mine strength=0.5"
    assert own.identity != Run(run, record).identity


# Compact copies


def test_a_compact_copy_is_the_same_run_without_the_places_of_the_machine(run, tmp_path):
    record = json.loads((run / "record.json").read_text())
    record["config"]["data_dir"] = "/home/somebody/data"
    write_compact(record, tmp_path / "copy.json")
    text = (tmp_path / "copy.json").read_text()
    assert "somebody" not in text
    assert len(text) < 0.7 * (run / "record.json").stat().st_size
    assert len(text.splitlines()) == len(record) + 2
    copy = json.loads(text)
    assert copy.pop("config")["data_dir"] == "data"
    del record["config"]
    assert copy == record
    (found,) = find_records([tmp_path])
    assert found.identity == find_records([run / "record.json"])[0].identity
