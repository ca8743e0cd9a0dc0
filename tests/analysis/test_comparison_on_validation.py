"""Comparison by validation accuracy."""

import csv
import io
import json
import statistics
from pathlib import Path

import pytest

from analysis.synthetic_records import held_out, record, write
from probmask.analysis.comparison import compare
from probmask.analysis.records import Run
from probmask.cli import main
from probmask.errors import InputError


def validated(method="probmask", sparsity=0.98, seed=0, *, validation, **changes):
    return record(method, sparsity, seed, selection=held_out(validation), **changes)


def runs_of(*records):
    return [Run(Path(f"synthetic-{index}.json"), made) for index, made in enumerate(records)]


def printed(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def opposite(tmp_path):
    """Runs whose test and validation accuracies have opposite orders."""
    for seed in (0, 1):
        write(tmp_path / f"a{seed}", validated(seed=seed, accuracy=50.0, validation=70.25 + seed))
        write(
            tmp_path / f"b{seed}",
            validated("gmp", seed=seed, accuracy=90.0, validation=65.0 + seed),
        )
    return tmp_path


def test_validation_accuracy_decides():
    validations = [61.25, 60.0, 62.5]
    runs = runs_of(
        *(validated(seed=s, accuracy=10.0 * s, validation=v) for s, v in enumerate(validations)),
        validated("gmp", accuracy=99.0, validation=50.0),
    )
    (setting,) = compare(runs, "val")
    probmask, gmp = setting.cells
    assert probmask.mean == statistics.mean(validations)
    assert probmask.deviation == statistics.stdev(validations)
    assert (gmp.mean, gmp.deviation) == (50.0, None)
    assert [setting.cells[index].label for index in setting.best] == ["probmask"]
    (on_test,) = compare(runs)
    assert [on_test.cells[index].label for index in on_test.best] == ["gmp"]


def test_the_table_names_the_images(opposite, capsys):
    assert printed(capsys, opposite, "--on", "val", "--format", "markdown") == (
        "**resnet14 on cifar10, 30 epochs, 10,000 training images, batches of 128**\n\n"
        "| method | 98 % |\n|---|---:|\n"
        "| probmask | 70.75 ± 0.71 ★ |\n| gmp | 65.50 ± 0.71 |\n\n"
        "validation accuracy at the last epoch, %: mean ± standard deviation over 2 seeds; "
        "★ best at its sparsity\n"
    )
    on_test = printed(capsys, opposite, "--on", "test")
    assert on_test == printed(capsys, opposite)
    assert "\ntest accuracy at the last epoch, %: " in on_test


@pytest.mark.parametrize(("on", "accuracies"), [("val", [70.75, 65.5]), ("test", [50.0, 90.0])])
def test_csv_and_json_name_the_images(on, accuracies, opposite, capsys):
    rows = list(
        csv.DictReader(io.StringIO(printed(capsys, opposite, "--on", on, "--format", "csv")))
    )
    (table,) = json.loads(printed(capsys, opposite, "--on", on, "--json"))["settings"]
    assert [row["accuracy_on"] for row in rows] == [on, on]
    assert [float(row["accuracy"]) for row in rows] == accuracies
    assert [cell["accuracy_on"] for cell in table["cells"]] == [on, on]
    assert [cell["accuracy"] for cell in table["cells"]] == accuracies
    assert [cell["best"] for cell in table["cells"]] == [on == "val", on == "test"]


def test_the_paper_s_accuracy_is_omitted_for_validation(tmp_path, capsys):
    made = validated("probmask", 0.95, validation=60.0, model="resnet32", train_images=50000)
    made["config"]["model"] = "resnet32"
    made["method"].update(scope="global", train_weights=True)
    write(tmp_path / "run", made)
    assert "paper, 95 %" in printed(capsys, tmp_path)
    assert "paper" not in printed(capsys, tmp_path, "--on", "val")
    (table,) = json.loads(printed(capsys, tmp_path, "--on", "val", "--json"))["settings"]
    assert table["cells"][0]["paper"] is None


@pytest.mark.parametrize("selection", [None, {**held_out(60.0), "on": "test"}])
def test_a_run_without_validation_accuracy_raises(selection):
    runs = runs_of(validated("gmp", validation=60.0), record(selection=selection))
    assert len(compare(runs)) == 1
    with pytest.raises(InputError) as caught:
        compare(runs, "val")
    assert str(caught.value) == (
        "synthetic-1.json: --on val needs a validation accuracy, and this run has none; train it "
        'with select_on = "val", omit it, or compare with --on test.'
    )
