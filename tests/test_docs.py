"""Tables in the docs are what commands print; every method has its page."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from probmask.cli import main
from probmask.methods import METHODS
from probmask.sweeps.grid import load_grid

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"models": "models_and_data.md", "data": "models_and_data.md", "methods": "methods.md"}


@pytest.mark.parametrize("what", PAGES)
def test_tables_are_what_the_command_prints(what, capsys):
    assert main(["list", what, "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("| name |")
    page = (DOCS / PAGES[what]).read_text(encoding="utf-8")
    assert f"`probmask list {what} --markdown`:\n\n{printed}\n" in page


def test_the_table_of_experiments_is_what_the_command_prints(capsys):
    assert main(["reproduce", "--list", "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert f"`probmask reproduce --list --markdown`:\n\n{printed}\n" in page


def test_the_example_of_a_sweep_has_the_runs_that_the_page_says(tmp_path):
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sweep.toml").write_text(example)
    runs = load_grid(tmp_path / "sweep.toml")
    assert len(runs) == 2 * 2 * 2 + 1
    assert {run.config.epochs for run in runs} == {20}


@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_every_flag_of_a_sweep_is_on_its_page(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    page = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert [flag for flag in sorted(flags) if flag not in page] == []


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_with_all_its_options(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    settings = {field.name for field in fields(METHODS[name])} - {"sparsity"}
    assert [option for option in settings if f"`{option}" not in page] == []
    assert METHODS[name].year is None or str(METHODS[name].year) in page
    assert f"methods/{name}.md" in (DOCS / "methods.md").read_text(encoding="utf-8")
