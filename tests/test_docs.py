"""Tables in the docs are what commands print; every method has its page."""

from dataclasses import fields
from pathlib import Path

import pytest

from probmask.cli import main
from probmask.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {"models": "models_and_data.md", "data": "models_and_data.md", "methods": "methods.md"}


@pytest.mark.parametrize("what", PAGES)
def test_tables_are_what_the_command_prints(what, capsys):
    assert main(["list", what, "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("| name |")
    page = (DOCS / PAGES[what]).read_text(encoding="utf-8")
    assert f"`probmask list {what} --markdown`:\n\n{printed}\n" in page


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_with_all_its_options(name):
    page = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
    settings = {field.name for field in fields(METHODS[name])} - {"sparsity"}
    assert [option for option in settings if f"`{option}" not in page] == []
    assert METHODS[name].year is None or str(METHODS[name].year) in page
    assert f"methods/{name}.md" in (DOCS / "methods.md").read_text(encoding="utf-8")
