"""Tables in the docs are what the commands above them print."""

from pathlib import Path

import pytest

from probmask.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "models_and_data.md"


@pytest.mark.parametrize("what", ["models", "data"])
def test_the_tables_of_networks_and_data_sets(what, capsys):
    assert main(["list", what, "--markdown"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("| name |")
    assert f"`probmask list {what} --markdown`:\n\n{printed}\n" in PAGE.read_text(encoding="utf-8")
