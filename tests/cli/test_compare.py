"""`probmask compare` of real runs, on the test images and on those held out."""

import json

import pytest

from probmask.cli import main
from probmask.training.run import train
from training.small import small


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that held images out, and one that trained on all."""
    root = tmp_path_factory.mktemp("compare")
    for name, select_on in (("held", "val"), ("whole", "none")):
        train(small(epochs=1, select_on=select_on), out=root / name)
    return root


def test_either_accuracy_is_the_one_of_the_record(runs, capsys):
    record = json.loads((runs / "held" / "record.json").read_text())
    for on, expected in (("val", record["selection"]), ("test", record["test"])):
        assert main(["compare", str(runs / "held"), "--on", on, "--json"]) == 0
        (setting,) = json.loads(capsys.readouterr().out)["settings"]
        (cell,) = setting["cells"]
        assert (cell["accuracy_on"], cell["accuracy"]) == (on, expected["accuracy"])


@pytest.mark.parametrize("form", ["text", "markdown", "csv", "json"])
def test_a_run_that_held_nothing_out_is_refused_in_one_line(form, runs, capsys):
    assert main(["compare", str(runs), "--on", "val", "--format", form]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert f"{runs / 'whole' / 'record.json'}: --on val needs a validation accuracy" in said.err
    assert main(["compare", str(runs), "--format", form]) == 0


def test_other_images_are_not_known(runs, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compare", str(runs), "--on", "train"])
    assert caught.value.code == 2
    assert "'train'" in capsys.readouterr().err
