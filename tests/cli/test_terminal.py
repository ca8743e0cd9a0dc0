"""Text from files reaches the terminal without escapes, and rich does not interpret it."""

import ast
import json
import shutil
from pathlib import Path

import pytest
import torch

import probmask.cli
from probmask.artifact import save
from probmask.cli import main
from probmask.messages import printable
from probmask.training.progress import Bar, Status
from probmask.training.trainer import train
from training.small import small

# Markup of rich and its emoji, a terminal escape (7 and 8 bit), a bell, reversed text, a new line.
HOSTILE = "[/red]:bomb:\x1b[2J\x9b2J\x07\u202e\x7f\nprobmask: forged"
RAW = set("\x1b\x9b\x07\u202e\x7f\U0001f4a3")


def hostile(value):
    """Replace every text in nested lists and tables."""
    if isinstance(value, dict):
        return {key: hostile(each) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each) for each in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(small(epochs=1), out=tmp_path_factory.mktemp("terminal") / "run").directory


@pytest.fixture
def run(trained, tmp_path):
    """A finished run in a directory with a hostile name; its record and its artifact are hostile.

    Texts that decide whether the files are read at all stay as they are.
    """
    path = tmp_path / HOSTILE.replace("/", "")
    shutil.copytree(trained, path)
    record = json.loads((path / "record.json").read_text())
    kept = {key: record[key] for key in ("config", "method", "selection")}
    forged = {**hostile(record), **kept, "model": HOSTILE, "unreadable": [HOSTILE]}
    forged["config"] = {**kept["config"], "model": f"{HOSTILE}:x", "exclude": [HOSTILE]}
    (path / "record.json").write_text(json.dumps(forged))
    network = torch.nn.Module()
    network.register_buffer(HOSTILE, torch.ones(2, 2))
    metadata = {**hostile(record), HOSTILE: HOSTILE, "method": {"name": HOSTILE, HOSTILE: HOSTILE}}
    save(network, path / "model.safetensors", metadata=metadata, overwrite=True)
    text = (path / "config.toml").read_text()
    assert 'model = "smallconv"' in text
    model = f"{HOSTILE}:x".encode("unicode_escape").decode().replace("\\x", "\\u00")
    (path / "config.toml").write_text(text.replace('"smallconv"', f'"{model}"'))
    return path


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("compare RUN", 0),
        ("compare RUN --format markdown", 0),
        ("compare RUN --format csv", 0),
        ("compare RUN --json", 0),
        ("report RUN --out OUT", 0),
        ("watch RUN", 0),
        ("watch PARENT", 0),
        ("watch RUN --json", 0),
        ("inspect RUN", 0),
        ("inspect RUN --json", 0),
        ("train --resume RUN --trust", 0),
        ("train --resume RUN", 2),
        ("evaluate RUN", 2),
        ("bench RUN", 2),
        ("export RUN OUT", 2),
        ("sweep RUN/config.toml", 2),
        ("train RUN/config.toml", 2),
    ],
)
def test_text_from_files_is_made_safe(run, tmp_path, capfd, command, code):
    names = {"RUN": str(run), "PARENT": str(run.parent), "OUT": str(tmp_path / HOSTILE[8:])}
    arguments = []
    for word in command.split():
        for name, path in names.items():
            word = word.replace(name, path)
        arguments.append(word)
    assert main(arguments) == code
    printed = "".join(capfd.readouterr())
    assert RAW.isdisjoint(printed)
    assert "\nprobmask: forged" not in printed
    assert "forged" in printed


def test_a_progress_bar_shows_its_title_verbatim(capfd):
    with Bar(HOSTILE, 10) as bar:
        bar.show(Status(1, 1, 1, 0.5, 50.0, 0.9))
    printed = capfd.readouterr().err
    assert "[/red]:bomb:" in printed
    assert RAW.isdisjoint(printed)


def test_printable_keeps_ordinary_text():
    assert printable("résumé 3×32 ★ 猫") == "résumé 3×32 ★ 猫"


def test_only_the_module_terminal_prints():
    """Every other module would have to make its texts safe itself."""
    directory = Path(probmask.cli.__file__).parent
    for path in sorted(directory.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert path.stem == "terminal" or node.func.id != "print", path
