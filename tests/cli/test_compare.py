"""`probmask compare` of real runs by test and validation accuracy."""

import json

import pytest

from probmask.cli import main
from probmask.training.trainer import train
from training.small import small


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with validation images and one without."""
    root = tmp_path_factory.mktemp("compare")
    for name, select_on in (("held", "val"), ("whole", "none")):
        train(small(epochs=1, select_on=select_on), out=root / name)
    return root


def test_test_and_validation_accuracy(runs, capsys):
    record = json.loads((runs / "held" / "record.json").read_text())
    for on, expected in (("val", record["selection"]), ("test", record["test"])):
        assert main(["compare", str(runs / "held"), "--on", on, "--json"]) == 0
        (setting,) = json.loads(capsys.readouterr().out)["settings"]
        (cell,) = setting["cells"]
        assert (cell["accuracy_on"], cell["accuracy"]) == (on, expected["accuracy"])


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "json"])
def test_a_run_without_validation_images_raises(form, runs, capsys):
    assert main(["compare", str(runs), "--on", "val", "--format", form]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"{runs / 'whole' / 'record.json'}: --on val needs a validation accuracy" in printed.err
    assert main(["compare", str(runs), "--format", form]) == 0


def test_updates_and_methods_select_rows(runs, capsys):
    def rows(*flags):
        assert main(["compare", str(runs), "--json", *flags]) == 0
        settings = json.loads(capsys.readouterr().out)["settings"]
        return sorted(cell["method"] for setting in settings for cell in setting["cells"])

    train(
        small(epochs=2, select_on="none", method={"name": "gmp", "sparsity": 0.5}),
        out=runs / "longer",
    )
    record = json.loads((runs / "longer" / "record.json").read_text())
    both = rows()
    assert len(both) == 3
    assert rows("--updates", str(record["updates"])) == ["gmp"]
    assert rows("--methods", "g*", "absent") == ["gmp"]
    assert rows("--methods", "*") == both
    assert main(["compare", str(runs), "--updates", "7", "--methods", "gmp", "x*"]) == 2
    expected = "found no run of 7 updates with the method 'gmp' or 'x*'; see the runs without"
    assert expected in capsys.readouterr().err


def test_unknown_images_raise(runs, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(runs), "--on", "train"])
    assert caught.value.code == 2
    assert "--on train: no such choice; choose from test, val" in capsys.readouterr().err
