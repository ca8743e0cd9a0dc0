"""Grouping of runs into tables, and the output of `probmask compare`."""

import csv
import io
import json
import statistics

import pytest

from analysis.synthetic_records import record, write, write_grid
from probmask.analysis.comparison import compare, rounded
from probmask.analysis.records import Run, find_records
from probmask.cli import main


def runs_of(*records):
    return [Run(f"synthetic-{index}", made) for index, made in enumerate(records)]


def printed(capsys, *arguments):
    assert main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_mean_and_deviation_over_seeds():
    accuracies = [61.25, 60.0, 62.5]
    (setting,) = compare(
        runs_of(*(record(seed=seed, accuracy=value) for seed, value in enumerate(accuracies)))
    )
    (cell,) = setting.cells
    assert [run.seed for run in cell.runs] == [0, 1, 2]
    assert cell.mean == statistics.mean(accuracies)
    assert cell.deviation == statistics.stdev(accuracies)
    assert setting.best == frozenset()  # with one method there is no best


def test_a_single_run_has_no_deviation():
    (setting,) = compare(runs_of(record()))
    assert setting.cells[0].deviation is None


def test_best_at_each_sparsity_with_ties():
    (setting,) = compare(
        runs_of(
            record("gmp", 0.95, accuracy=60.0),
            record("rigl", 0.95, accuracy=60.0),
            record("str", 0.95, accuracy=59.0),
            record("gmp", 0.98, accuracy=40.0),
            record("rigl", 0.98, accuracy=41.0),
        )
    )
    best = {(setting.cells[index].label, setting.cells[index].sparsity) for index in setting.best}
    assert best == {("gmp", 0.95), ("rigl", 0.95), ("rigl", 0.98)}


def test_columns_of_updates(tmp_path, capsys):
    made = [record("gmp", 0.98, epochs=30, accuracy=50.0)]
    for epochs, gmp, rigl in ((12, 60.0, 61.0), (30, 66.0, 65.0)):
        made.append(record("gmp", 0.95, epochs=epochs, accuracy=gmp))
        made.append(record("rigl", 0.95, epochs=epochs, accuracy=rigl))
        made.append(record("dense", 0.0, epochs=epochs, accuracy=epochs + 50.0))
    for index, each in enumerate(made):
        write(tmp_path / str(index), each)
    text = printed(capsys, tmp_path, "--columns", "updates", "--format", "markdown")
    at_95, at_98 = text.split("\n\n**")
    assert "95 % sparsity" in at_95
    assert "98 % sparsity" in at_98
    dense = "| dense | 62.00 | 80.00 |"  # shown in every table, ranked in none
    for row in (
        "| method | 936 | 2,340 |",
        "| gmp | 60.00 | 66.00 ★ |",
        "| rigl | 61.00 ★ | 65.00 |",
        dense,
    ):
        assert row in at_95
    assert dense in at_98
    assert "| gmp | – | 50.00 |" in at_98


def test_ranking_at_the_most_common_sparsity():
    (setting,) = compare(
        runs_of(
            record("gmp", 0.95, accuracy=60.0),
            record("rigl", 0.95, accuracy=61.0),
            record("str", 0.95, accuracy=59.0),
            record("gmp", 0.98, accuracy=50.0),
            record("feather", 0.98, accuracy=70.0),
            record("st3", 0.9, accuracy=70.0),
        )
    )
    assert setting.ranking == ["rigl", "gmp", "str", "st3", "feather"]


def test_ranking_at_the_highest_of_equally_common_sparsities():
    missed = record("str", 0.98, accuracy=90.0)
    missed["layers"][0]["kept"] += 50
    (setting,) = compare(
        runs_of(
            missed,
            *(record("gmp", sparsity, accuracy=60.0) for sparsity in (0.95, 0.98)),
            *(record("rigl", sparsity, accuracy=50.0) for sparsity in (0.95, 0.98)),
            record("feather", 0.95, accuracy=99.0),
        )
    )
    assert setting.ranking == ["gmp", "rigl", "str", "feather"]


def test_a_run_that_missed_its_target_is_not_ranked():
    missed = record("str", accuracy=90.0)
    missed["layers"][0]["kept"] += 50
    missed["sparsity"]["reached"] = 0.979
    (setting,) = compare(runs_of(missed, record("gmp", accuracy=50.0), record(accuracy=60.0)))
    cells = {cell.label: cell for cell in setting.cells}
    assert not cells["str"].verified
    assert [setting.cells[index].label for index in setting.best] == ["probmask"]


def test_sparsity_of_macs_is_a_different_level():
    in_macs = record("probmask cost=flops", accuracy=99.0)
    (setting,) = compare(runs_of(in_macs, record(accuracy=60.0), record("gmp", accuracy=50.0)))
    assert {cell.level for cell in setting.cells} == {(0.98, "flops"), (0.98, "params")}
    assert [setting.cells[index].label for index in setting.best] == ["probmask"]


@pytest.mark.parametrize("change", [{"epochs": 31}, {"model": "resnet20"}, {"data": "cifar100"}])
def test_different_training_is_a_different_table(change):
    other = record("gmp", **{key: value for key, value in change.items() if key == "epochs"})
    other.update(change)
    other["config"] = {**other["config"], **change}
    assert len(compare(runs_of(record(), other))) == 2


def test_more_epochs_are_a_different_table():
    several = record("lottery")
    several["epochs"] = 90  # the configuration has 30 per round
    assert [setting.details[0] for setting in compare(runs_of(record(), several))] == [
        "30 epochs",
        "90 epochs",
    ]


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "json"])
def test_output_does_not_depend_on_the_order_of_paths(form, tmp_path, capsys):
    write_grid(tmp_path)
    directories = sorted(tmp_path.iterdir())
    first = printed(capsys, *directories, "--format", form)
    assert printed(capsys, *reversed(directories), "--format", form) == first
    assert printed(capsys, tmp_path, "--format", form) == first


def test_text_and_markdown_tables(tmp_path, capsys):
    for seed, accuracy in enumerate((60.0, 61.0)):
        write(tmp_path / f"a{seed}", record(seed=seed, accuracy=accuracy))
        write(tmp_path / f"b{seed}", record("gmp", seed=seed, accuracy=accuracy - 5))
    assert printed(capsys, tmp_path, "--format", "markdown") == (
        "**resnet14 on cifar10, 30 epochs, 10,000 training images, batches of 128**\n\n"
        "| method | 98 % |\n|---|---:|\n"
        "| probmask | 60.50 ± 0.71 ★ |\n| gmp | 55.50 ± 0.71 |\n\n"
        "test accuracy at the last epoch, %: mean ± standard deviation over 2 seeds; "
        "★ best at its sparsity\n"
    )
    write(tmp_path / "more", record(seed=2, accuracy=60.5))
    text = printed(capsys, tmp_path)
    assert "60.50 ± 0.50 (3) ★" in text
    assert "55.50 ± 0.71 (2)" in text


def test_a_missed_target_is_marked(tmp_path, capsys):
    missed = record("str", accuracy=90.0)
    missed["layers"][0]["kept"] += 50
    missed["sparsity"]["reached"] = 0.979
    write(tmp_path / "missed", missed)
    assert "90.00 † 97.90 %" in printed(capsys, tmp_path)


def test_latencies_of_different_conditions_are_not_averaged(tmp_path, capsys):
    timed = {"milliseconds": 2.0, "batch": 1, "threads": 1}
    write(tmp_path / "a", record(seed=0, latency=timed))
    write(tmp_path / "b", record(seed=1, latency={**timed, "milliseconds": 3.0}))

    def cell():
        return json.loads(printed(capsys, tmp_path, "--json"))["settings"][0]["cells"][0]

    assert (cell()["milliseconds"], cell()["batch"]) == (2.5, 1)
    assert "| 2.50 | 1 | 1 |" in printed(capsys, tmp_path, "--format", "markdown")
    write(tmp_path / "b", record(seed=1, latency={**timed, "batch": 64}))
    assert (cell()["milliseconds"], cell()["batch"]) == (None, None)
    write(tmp_path / "b", record(seed=1))
    assert cell()["milliseconds"] is None
    assert "threads" not in printed(capsys, tmp_path)


def test_the_paper_s_accuracy_is_shown(tmp_path, capsys):
    made = record("probmask", 0.95, model="resnet32", train_images=50000)
    made["config"]["model"] = "resnet32"
    made["method"].update(scope="global", train_weights=True)
    write(tmp_path / "run", made)
    (cell,) = json.loads(printed(capsys, tmp_path, "--json"))["settings"][0]["cells"]
    (setting,) = compare(find_records([tmp_path]))
    assert cell["paper"] == setting.cells[0].paper
    assert cell["paper"] == 94.16  # Table 1
    assert f"| {rounded(cell['paper'])} |" in printed(capsys, tmp_path, "--format", "markdown")


def test_csv_and_json_are_not_rounded(tmp_path, capsys):
    write_grid(tmp_path)
    rows = list(csv.DictReader(io.StringIO(printed(capsys, tmp_path, "--format", "csv"))))
    (table,) = json.loads(printed(capsys, tmp_path, "--json"))["settings"]
    assert len(rows) == len(table["cells"]) == 13
    (setting,) = compare(find_records([tmp_path]))
    for row, cell, known in zip(rows, table["cells"], setting.cells, strict=True):
        assert float(row["accuracy"]) == cell["accuracy"] == known.mean
        assert row["method"] == cell["method"] == known.label


def test_markdown_in_names_is_escaped(tmp_path, capsys):
    hostile = record("gmp", model="a|b<i>")
    hostile["config"]["model"] = "a|b<i>"
    write(tmp_path / "run", hostile)
    assert "a\\|b\\<i\\> on cifar10" in printed(capsys, tmp_path, "--format", "markdown")


def test_rounding_is_half_away_from_zero():
    assert [rounded(value) for value in (73.975, 0.125, 60, 1e-9)] == [
        "73.98",
        "0.13",
        "60.00",
        "0.00",
    ]


def test_input_errors_are_one_line(tmp_path, capsys):
    odd = {**record(), "sparsity": {"asked": 98, "reached": 98}}
    write(tmp_path / "runs" / "odd", odd)
    assert main(["compare", str(tmp_path / "runs")]) == 2
    assert "sparsity.asked = 98" in capsys.readouterr().err
    tmp_path = tmp_path / "empty"
    tmp_path.mkdir()
    assert main(["compare", str(tmp_path)]) == 2
    assert "no record.json" in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "nowhere")]) == 2
    assert "no such file" in capsys.readouterr().err
