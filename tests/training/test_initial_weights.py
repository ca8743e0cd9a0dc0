"""A pretrained start: which files are read, what must fit, and what a run remembers."""

import hashlib
import logging
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from probmask.artifact import load_state, save
from probmask.cli import main
from probmask.errors import InputError, RestartWarning
from probmask.models import MODELS, build_model, smallconv
from probmask.training.config import TrainConfig, load_config
from probmask.training.initial_weights import load_initial_weights
from probmask.training.trainer import train
from reference.published_resnets import Published20, Published50
from training.small import Stopped, flags, small, stop_after_checkpoint

BRIEF = {"epochs": 1, "batch_size": 280, "method__sparsity": 0.5}


def network(seed=0, classes=10):
    torch.manual_seed(seed)
    model = smallconv(width=8, classes=classes)
    for module in model.modules():  # as after a training
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2.0)
            module.weight.data.uniform_(0.5, 2.0)
    return model


def written(path, model, form):
    state = model.state_dict()
    if form == "safetensors":
        save_file(state, path)
    elif form == "artifact":
        save(model, path, overwrite=True)
    elif form == "directory":
        path.mkdir()
        save_file(state, path / "model.safetensors")
    elif form == "old torch file":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in state.items()}
        content = {"torch": state, "state_dict": {"state_dict": wrapped, "epoch": 3}}
        torch.save({**content, "model": {"model": wrapped, "lr": 0.1}}[form], path)
    return path


@pytest.mark.parametrize(
    "form",
    ["safetensors", "artifact", "directory", "torch", "old torch file", "state_dict", "model"],
)
def test_every_kind_of_file_gives_the_same_weights(tmp_path, form):
    source, target = network(0), network(1)
    load_initial_weights(target, str(written(tmp_path / "file", source, form)))
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_hostile_and_damaged_files_are_refused_without_executing_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, path = network(), tmp_path / "file"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def refused(expected):
        with pytest.raises(InputError, match=expected) as caught:
            load_initial_weights(model, str(path))
        assert "\n" not in str(caught.value)

    for new in (True, False):
        torch.save({"fc": Payload()}, path, _use_new_zipfile_serialization=new)
        refused("loading it could execute code; save model.state_dict")
        torch.save(model, path, _use_new_zipfile_serialization=new)
        refused("loading it could execute code")
    assert not (tmp_path / "executed").exists()
    damaged = r"is damaged or incomplete \(.+\); copy or download it again\.$"
    for new in (True, False):
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=new)
        whole = path.read_bytes()
        for size in (50, len(whole) - 500):
            path.write_bytes(whole[:size])
            refused(damaged)
    save_file(model.state_dict(), path)
    path.write_bytes(path.read_bytes()[:-500])
    refused(damaged)
    save(model, path, overwrite=True)
    path.write_bytes(path.read_bytes()[:-50])
    refused("file")
    torch.save(model.state_dict(), tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(path, "w") as packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member), zipfile.ZIP_DEFLATED)
    refused("is compressed")
    torch.save([1, 2], path)
    refused("contains no state_dict")
    torch.save({"epoch": 3, "weights": model.state_dict()}, path)
    refused("'epoch' is not a tensor; save")
    torch.save({"a": torch.empty(3, device="meta")}, path)
    refused("a is not a plain dense tensor")
    path.write_text("no weights")
    refused("is neither a safetensors file, nor an artifact")
    path.unlink()
    refused("No such file")
    os.mkfifo(path)
    refused("is not a regular file")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_one_message_lists_all_that_does_not_fit(tmp_path):
    state = network(classes=7).state_dict()
    state["extra"] = torch.ones(2)
    del state["features.0.weight"]
    save_file(state, tmp_path / "file")
    with pytest.raises(InputError) as caught:
        load_initial_weights(network(), str(tmp_path / "file"))
    message = str(caught.value)
    assert "1 missing in the file (features.0.weight)" in message
    assert "1 not in the network (extra)" in message
    assert "1 of another shape (classifier.weight: [7, 16] in the file, [10, 16]" in message
    assert "--set 'init_skip=[\"fc.*\"]'" in message


def test_skipped_weights_stay_as_they_are_and_all_others_are_loaded(tmp_path):
    source, target = network(0, classes=7), network(1)
    fresh = target.classifier.weight.detach().clone()
    path = str(written(tmp_path / "file", source, "torch"))
    load_initial_weights(target, path, skip=["classifier"])
    assert torch.equal(target.classifier.weight, fresh)
    assert torch.equal(target.features[0].weight, source.features[0].weight)
    with pytest.raises(InputError, match=r"'head\.\*' matches no weight"):
        load_initial_weights(target, path, skip=["classifier", "head.*"])


def test_values_that_cannot_be_trained_are_refused(tmp_path):
    for wrong, expected in ((torch.nan, "not finite"), (None, "has the type torch.int64")):
        state = network().state_dict()
        weight = state["classifier.weight"]
        state["classifier.weight"] = weight.long() if wrong is None else weight * wrong
        save_file(state, tmp_path / "file")
        with pytest.raises(InputError, match=expected):
            load_initial_weights(network(), str(tmp_path / "file"))


def test_tied_weights_and_missing_batch_counters_are_accepted(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    source = Tied()
    save_file({k: v for k, v in source.state_dict().items() if k != "b.weight"}, tmp_path / "file")
    target = Tied()
    load_initial_weights(target, str(tmp_path / "file"))
    assert torch.equal(target.b.weight, source.a.weight)
    state = {k: v for k, v in network().state_dict().items() if "num_batches" not in k}
    save_file(state, tmp_path / "file")
    load_initial_weights(network(1), str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("name", "settings", "published"),
    [("resnet20", {"shortcut": "pad"}, Published20), ("resnet50", {"width": 4}, Published50)],
)
def test_published_residual_networks_load_under_their_own_names(
    tmp_path, name, settings, published
):
    """Names as in torchvision, a linear classifier with a bias."""
    torch.manual_seed(0)
    source = published().eval()
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.weight.data.uniform_(0.5, 2.0)
    save_file(source.state_dict(), tmp_path / "file")
    model = build_model(name, settings | {"classes": 10, "classifier_bias": True}).eval()
    translate = MODELS[name].own_name
    load_initial_weights(model, str(tmp_path / "file"), own_name=translate)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(model(images), source(images), rtol=1e-4, atol=1e-4)
    again = build_model(name, settings | {"classes": 10, "classifier_bias": True})
    written(tmp_path / "own", model, "torch")  # our own names are not translated
    load_initial_weights(again, str(tmp_path / "own"), own_name=translate)
    assert torch.equal(again.stem[0].weight, model.stem[0].weight)
    plain = build_model(name, settings | {"classes": 10})
    with pytest.raises(InputError, match=r"1 not in the network \(classifier\.bias\)"):
        load_initial_weights(plain, str(tmp_path / "file"), own_name=translate)


def test_a_module_is_added_to_or_removed_from_the_names(tmp_path):
    """As between BertModel and BertForSequenceClassification of transformers."""
    sizes = {"vocabulary": 20, "width": 8, "layers": 1, "heads": 2, "positions": 9}
    source, target = (build_model("bert", sizes) for _ in range(2))
    state = {name: t.contiguous() for name, t in source.bert.state_dict().items()}
    save_file(state | {"embeddings.position_ids": torch.arange(9)[None]}, tmp_path / "base")
    with pytest.raises(InputError, match=r"2 missing in the file \(classifier\.weight; class"):
        load_initial_weights(target, str(tmp_path / "base"))
    load_initial_weights(target, str(tmp_path / "base"), skip=["classifier"])
    for name, tensor in source.bert.state_dict().items():
        assert torch.equal(target.bert.state_dict()[name], tensor), name
    wrapped = {f"model.{name}": tensor for name, tensor in network(0).state_dict().items()}
    torch.save({"state_dict": wrapped}, tmp_path / "lightning.ckpt")
    small_network = network(1)
    load_initial_weights(small_network, str(tmp_path / "lightning.ckpt"))
    assert torch.equal(small_network.features[0].weight, network(0).features[0].weight)
    with pytest.raises(InputError, match=r"23 not in the network \(embeddings\.LayerNorm\.bias"):
        load_initial_weights(small_network, str(tmp_path / "base"))


def test_a_run_starts_from_the_file_and_resumes_without_it(tmp_path, monkeypatch):
    source = network()
    path = written(tmp_path / "weights.pt", source, "torch")
    settings = BRIEF | {"init": str(path), "checkpoint_seconds": 0}
    still = small(**settings | {"epochs": 2, "method__name": "magnitude", "optimizer__lr": 0.0})
    whole = train(still, out=tmp_path / "still")
    kept = load_state(whole.directory / "model.safetensors")
    for name, weight in source.named_parameters():
        mask = kept[name] != 0
        assert torch.equal(kept[name][mask], weight.detach()[mask])
    assert whole.record["init"]["file"] == "weights.pt"
    assert whole.record["init"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()

    whole = train(small(**settings), out=tmp_path / "whole").directory
    config = small(**settings)
    with monkeypatch.context() as patch:
        stop_after_checkpoint(patch, 3)
        with pytest.raises(Stopped):
            train(config, out=tmp_path / "run")
    path.unlink()
    train(out=tmp_path / "run", resume=True)
    result = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert result == (whole / "model.safetensors").read_bytes()
    assert main(["evaluate", str(tmp_path / "run")]) == 0  # nor does this need it


def test_a_run_without_checkpoint_starts_again_from_the_same_file_only(tmp_path, monkeypatch):
    path = written(tmp_path / "weights.pt", network(), "torch")
    config = small(**BRIEF, init=str(path), checkpoint_seconds=3600)
    straight = train(config, out=tmp_path / "straight").directory
    monkeypatch.setattr("probmask.training.loop.Loop.check_finite", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(config, out=tmp_path / "run")
    monkeypatch.undo()
    content = path.read_bytes()
    written(path, network(3), "torch")
    with pytest.raises(InputError, match="restore the file, or omit init_sha256"):
        train(out=tmp_path / "run", resume=True)
    path.write_bytes(content)
    with pytest.warns(RestartWarning):
        train(out=tmp_path / "run", resume=True)
    result = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert result == (straight / "model.safetensors").read_bytes()


def test_the_command_and_the_configuration(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "weights.pt", network(), "torch")
    arguments = ["train", "--out", "run", "--quiet", *flags(**BRIEF)]
    assert main([*arguments, "--init", "weights.pt"]) == 0
    config = load_config(tmp_path / "run" / "config.toml")
    assert config.init == str(tmp_path / "weights.pt")
    written(tmp_path / "other.pt", network(5), "torch")
    changed = load_config(tmp_path / "run" / "config.toml", [("init", "other.pt")])
    assert changed.init_sha256 != config.init_sha256  # the digest follows the file
    arguments[2] = "new"
    capsys.readouterr()
    assert main([*arguments, "--init", "nothing.pt"]) == 2
    assert "--init" in capsys.readouterr().err
    assert main([*arguments, "--init", "weights.pt", "--set", "model_args.width=16"]) == 2
    assert "does not fit the network" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="has no meaning without initial weights"):
        TrainConfig(init_skip=("fc",))


def test_a_pretrained_network_is_recognized_without_its_batchnorm_statistics(tmp_path, caplog):
    """The skipped BatchNorm looks fresh, but the run knows that its weights are not."""
    path = written(tmp_path / "weights.pt", network(), "torch")
    skip = ["features.1", "features.4", "features.8", "features.11"]
    caplog.set_level(logging.INFO, logger="probmask")
    train(small(**BRIEF), out=tmp_path / "fresh")
    assert "fades the initial values out" in caplog.text
    caplog.clear()
    train(small(**BRIEF, init=str(path), init_skip=skip), out=tmp_path / "run")
    assert "keeps the initial values up to high sparsity" in caplog.text
