"""What the README promises about `make demo`, the default run."""

import re
import tomllib
from pathlib import Path

import pytest

import probmask
from probmask.cli import main
from probmask.data import DATA

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute and a half of training on an idle core
def test_a_98_percent_sparse_network_within_two_points_of_dense(tmp_path):
    outcome = probmask.train(out=tmp_path / "demo")
    record, dense = outcome.record, outcome.dense
    assert (record["kept"], record["size"]) == (2039, 101_960)
    assert dense["test"]["accuracy"] > 97
    assert dense["test"]["accuracy"] - record["test"]["accuracy"] <= 2
    page = tmp_path / "demo" / "report.html"
    assert main(["report", str(tmp_path / "demo"), "--out", str(page)]) == 0
    assert "demo/dense" in page.read_text(encoding="utf-8")


def test_the_demo_ends_with_its_page():
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    last = recipe.group(1).splitlines()[-1]
    assert last.strip() == "$(BIN)/probmask report runs/demo --out runs/demo/report.html"


def test_the_documented_configuration_is_the_default_one():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    documented = tomllib.loads(block)
    assert documented.pop("model_args") == {"width": 40}
    assert documented.pop("data_args") == {"padding": DATA["digits"].defaults.padding}
    config = probmask.load_config(None, [("data", "digits")])
    # Two defaults are different for digits, as the comments next to them say.
    special = {"dense_twin": True, "accelerator": "cpu"}
    for key, value in documented.items():
        found = getattr(config, key)
        if key == "optimizer":
            assert {name: getattr(found, name) for name in value} == value
        else:
            found = list(found) if isinstance(found, tuple) else found
            assert found == special.get(key, value), key
