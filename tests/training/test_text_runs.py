"""Runs that classify sentences: every command, resuming, own networks, and wrong settings."""

import json
import sys

import pytest
import torch

from data.sentence_files import rows, write
from probmask.cli import main
from probmask.errors import InputError
from probmask.training.config import load_config, own_code
from probmask.training.trainer import train
from training.small import Stopped, stop_after_checkpoint

SETTINGS = {
    "data": "tsv",
    "epochs": 2,
    "batch_size": 16,
    "threads": 1,
    "tensorboard": False,
    "accelerator": "cpu",
    "method.sparsity": 0.5,
    "model_args.width": 16,
    "optimizer.lr": 0.005,
}
# As a model of Hugging Face: keyword inputs, and a mapping with the logits as output.
OWN = """
from collections import OrderedDict
from torch import nn

class Classifier(nn.Module):
    def __init__(self, classes, vocabulary):
        super().__init__()
        self.config = None
        self.tokens = nn.Embedding(vocabulary, 8)
        self.hidden = nn.Linear(8, 32)
        self.head = nn.Linear(32, classes)

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        mask = attention_mask[..., None]
        mean = (self.tokens(input_ids) * mask).sum(1) / mask.sum(1)
        return OrderedDict(logits=self.head(self.hidden(mean).relu()), hidden=mean)

def build(classes, vocabulary):
    return Classifier(classes, vocabulary)
"""


def config(folder, **overrides):
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, [*(SETTINGS | {"data_dir": str(folder)} | given).items()])


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "sentences"
    folder.mkdir()
    write(folder / "train.tsv", rows(160), "sentence\tlabel")
    write(folder / "test.tsv", rows(64, seed=2), "sentence\tlabel")
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "own_classifier.py").write_text(OWN)
    yield "own_classifier:build"
    sys.modules.pop("own_classifier", None)


def test_the_defaults_fit_sentences(folder):
    found = load_config(None, [("data", "tsv"), ("data_dir", str(folder))])
    assert (found.model, found.optimizer.name, found.optimizer.lr) == (
        "text_encoder",
        "adamw",
        1e-3,
    )
    sgd = load_config(None, [("data", "tsv"), ("optimizer.name", "sgd")])
    assert (sgd.optimizer.name, sgd.optimizer.lr) == ("sgd", 0.1)
    assert own_code(found) == {}


@pytest.mark.parametrize(
    ("include", "exclude"),
    [
        ([], ("tokens.weight", "positions.weight")),
        (["tokens"], ("positions.weight",)),
        (["*.weight"], ()),
    ],
)
def test_embeddings_stay_dense_unless_they_are_included(include, exclude):
    assert load_config(None, [("data", "tsv"), ("include", include)]).exclude == exclude
    given = load_config(None, [("data", "tsv"), ("include", include), ("exclude", ["positions"])])
    assert given.exclude == ("positions",)


def test_an_included_embedding_is_pruned_and_costs_no_multiplications(tmp_path, folder):
    record = train(config(folder, epochs=1, include=["tokens"]), out=tmp_path / "run").record
    (tokens,) = [layer for layer in record["layers"] if layer["name"] == "tokens.weight"]
    assert tokens["macs_per_weight"] == 0
    assert tokens["kept"] < tokens["size"]


@pytest.mark.filterwarnings("error::probmask.errors.UnmaskedWeightsWarning")
def test_a_run_learns_and_every_command_takes_it(tmp_path, folder, capsys):
    out = tmp_path / "run"
    record = train(config(folder, epochs=8), out=out).record
    assert record["test"]["accuracy"] > 80
    assert record["selection"]["total"] == 16
    assert record["image_shape"] is None
    assert record["examples"] == "sentences"
    assert record["model_args"] == {
        "classes": 2,
        "vocabulary": record["model_args"]["vocabulary"],
        "max_length": 128,
        "width": 16,
    }
    tokens = int(record["macs"]["example"].split()[3])
    assert record["macs"]["example"] == (
        f"a sentence of {tokens} tokens, the mean of the training sentences"
    )
    hidden = next(each for each in record["layers"] if each["name"] == "blocks.0.hidden.weight")
    assert hidden["macs_per_weight"] == tokens
    capsys.readouterr()
    assert main(["evaluate", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["correct"] == record["test"]["correct"]
    for command in ("inspect", "compare", "report", "watch"):
        arguments = ["--out", str(tmp_path / "page.html")] if command == "report" else []
        assert main([command, str(out), *arguments]) == 0
    text = capsys.readouterr().out
    assert "144 training sentences" in text
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page
    for command, expected in (
        (["evaluate", str(out), "--engine", "sparse"], "the engine takes images, but tsv has sent"),
        (["export", str(out), str(tmp_path / "a.onnx")], "text_encoder takes tokens"),
        (["bench", str(out)], "text_encoder takes tokens"),
        (["plan", "--model", "text_encoder", "--sparsity", "0.5"], "takes tokens"),
    ):
        assert main(command) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("method", ["probmask-tied", "probmask", "snip", "mlprune"])
def test_resuming_gives_the_same_network(tmp_path, folder, own, monkeypatch, method):
    network = {} if method == "probmask-tied" else {"model": own, "model_args": {}}
    settings = config(folder, method__name=method, checkpoint_seconds=0, **network)
    whole = train(settings, out=tmp_path / "whole").directory
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch, 7)
        with pytest.raises(Stopped):
            train(settings, out=tmp_path / "run")
    train(out=tmp_path / "run", resume=True)
    for file in ("model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / file).read_bytes() == (whole / file).read_bytes()


def test_an_own_network_and_tokenizer_are_remembered(tmp_path, folder, own, monkeypatch, capsys):
    """Keyword inputs and an output with logits; evaluated from another working directory."""
    library = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "good": 2, "film": 3}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    flags = [f"--set={key}={json.dumps(value)}" for key, value in SETTINGS.items() if "." in key]
    command = ["train", "--data=tsv", f"--data-dir={folder}", "--epochs=10", "--batch-size=16"]
    command += [*flags, "--set=model_args={}", "--set=data_args.tokenizer=tokenizer.json"]
    command += ["--set=optimizer.lr=0.05"]
    assert main([*command, "--model", own, "--out", "run", "--quiet"]) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["model_args"] == {"classes": 2, "vocabulary": 4}
    assert record["data_args"]["tokenizer"] == str(tmp_path / "tokenizer.json")
    assert record["test"]["accuracy"] > 80
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert main(["evaluate", "../run"]) == 0
    assert "as recorded" in capsys.readouterr().out
    made.add_tokens(["boring"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert main(["evaluate", "../run"]) == 2
    assert "restore the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"model": "smallconv"}, "smallconv: cannot process the sentences of up to 15 tokens"),
        ({"model_args__max_length": 4}, "15 tokens, but it was built for max_length=4"),
        ({"model_args__vocabulary": 4}, "cannot process the sentences of up to"),
        ({"model_args__heads": 3}, "width=16, heads=3.*the heads share the width evenly"),
        ({"channels_last": True}, "tsv has no images"),
        ({"batch_size": 1000}, "has 144 training sentences"),
        ({"data_args__train_sentences": 1000}, "has only 160 sentences"),
        ({"data_args__validation_sentences": 160}, "none would be left for training"),
    ],
)
def test_wrong_settings_raise_before_anything_is_created(tmp_path, folder, overrides, expected):
    overrides = {"model_args": {"width": 16}} | overrides
    if overrides.get("model") == "smallconv":
        overrides["model_args"] = {}
    with pytest.raises(InputError, match=expected):
        train(config(folder, **overrides), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_padding_does_not_change_the_output():
    from probmask.models import text_encoder

    torch.manual_seed(0)
    model = text_encoder(vocabulary=20, width=16, max_length=9).eval()
    ids = torch.randint(1, 20, (1, 5))
    padded = torch.cat([ids, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 4])
    with torch.no_grad():
        assert torch.allclose(model(ids), model(padded, mask), atol=1e-6)
        assert not torch.allclose(model(ids), model(padded), atol=1e-3)
