"""The callback for Lightning's Trainer: trainings equal those of an own loop, and are resumed."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import probmask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.callbacks import (
        Callback,
        ModelCheckpoint,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy

    from integrations.lightning_training import (
        METHODS,
        Module,
        Resumable,
        SaveRank,
        loader,
        module,
        train,
        trainer,
    )
    from probmask.integrations.lightning import SparsityCallback

# What Lightning itself warns about is not ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
SIZE = 12 * 32 + 32 * 3
KEEP = SIZE - round(0.8 * SIZE)


def equal_states(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def kept(model):
    return int(model.net[0].weight.count_nonzero() + model.net[4].weight.count_nonzero())


def own_loop(model, method, batches, *, epochs, accumulate=1, clip=None, scheduled=True):
    """Train as `Trainer` does, with the public functions of probmask."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = -(-len(batches) // accumulate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    sparsifier = probmask.attach(
        model,
        method,
        optimizer=optimizer,
        total_steps=epochs * steps,
        steps_per_epoch=steps,
        seed=3,
    )
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            if index % accumulate == 0:
                optimizer.zero_grad()
            left = len(batches) - index // accumulate * accumulate
            penalty = sparsifier.penalty() / min(accumulate, left)  # once per update
            (model.loss(batch) / accumulate + penalty).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        if scheduled:
            scheduler.step()
    sparsifier.finalize(data=batches)
    return model


class Manual(Module):
    """Manual optimization: two optimizers, one backward pass."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        parts = self.net[:3], self.net[3:]
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]

    def training_step(self, batch, index):
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers()[::-1]:
            optimizer.step()
        for optimizer in self.optimizers():
            optimizer.zero_grad()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Module, {}),
        (Module, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}),
        (Manual, {}),
    ],
)
def test_trainings_equal_those_of_an_own_loop(name, kind, settings, tmp_path):
    ours = module()
    torch.manual_seed(0)
    theirs = kind()
    ours.net[3].p = theirs.net[3].p = 0.0  # a DataLoader draws random numbers, a list does not
    batches = list(loader(shuffle=False))
    own_loop(
        ours,
        METHODS[name](),
        batches,
        epochs=4,
        accumulate=settings.get("accumulate_grad_batches", 1),
        clip=settings.get("gradient_clip_val"),
        scheduled=kind is Module,
    )
    callback = SparsityCallback(METHODS[name](), data="train", seed=3)
    trainer(tmp_path, callback, **settings).fit(theirs, loader(shuffle=False))
    assert kept(theirs) == callback.summary.kept == KEEP
    if name == "penalty":  # its gradient is added in another order
        torch.testing.assert_close(theirs.state_dict(), ours.state_dict())
    else:
        assert equal_states(theirs, ours)


def test_training_killed_in_mid_epoch_is_resumed_bit_for_bit(tmp_path):
    script = Path(__file__).with_name("lightning_training.py")
    killed = tmp_path / "killed"
    paths = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-W", "ignore", script, killed],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert [path.name for path in sorted(killed.iterdir())] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    undisturbed, summary = train(tmp_path / "undisturbed")
    resumed, again = train(killed, ckpt_path=killed / "epoch=1.ckpt")
    assert again == summary
    assert kept(resumed) == KEEP
    assert equal_states(resumed, undisturbed)


class Stop(Callback):
    """Interrupt the training before its fourth epoch."""

    def __init__(self, error):
        self.error = error

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 3:
            raise self.error


@pytest.mark.parametrize(
    ("name", "batches", "validated", "settings"),
    [
        ("tied", loader, False, {"accumulate_grad_batches": 4}),
        ("tied", loader, True, {"precision": "bf16-mixed", "val_check_interval": 3}),
        ("penalty", loader, True, {"check_val_every_n_epoch": 2}),
        ("learned", Resumable, False, {}),
        ("rigl", Resumable, False, {}),
    ],
)
def test_interrupted_training_is_resumed_bit_for_bit(name, batches, validated, settings, tmp_path):
    """From the end of an epoch, or from its middle with batches that can be resumed there."""
    validation = loader(shuffle=False) if validated else None
    often = {"every_n_train_steps": 4} if batches is Resumable else {}

    def fit(*others, ckpt_path=None):
        model = module(optimizer=torch.optim.AdamW)
        torch.manual_seed(8 if ckpt_path is None else 9)
        callback = SparsityCallback(METHODS[name](), data="train")
        last = ModelCheckpoint(tmp_path, "last", enable_version_counter=False, **often)
        fitting = trainer(tmp_path, callback, last, *others, **settings)
        try:
            fitting.fit(model, batches(), validation, ckpt_path=ckpt_path)
        except RuntimeError:
            assert callback.sparsifier is not None
        return model

    undisturbed = fit()
    (tmp_path / "last.ckpt").unlink()
    interrupted = fit(Stop(RuntimeError("power failure")))
    assert not equal_states(interrupted, undisturbed)
    assert equal_states(fit(ckpt_path=tmp_path / "last.ckpt"), undisturbed)
    assert kept(undisturbed) == KEEP


@pytest.mark.parametrize("name", ["learned", "rigl"])
def test_checkpoints_load_into_the_plain_module_and_are_tested_sparse(name, tmp_path):
    """A checkpoint of any epoch has the plain names; testing it tests what was validated."""
    model, validation = module(), loader(shuffle=False)
    checkpoints = ModelCheckpoint(tmp_path, "{epoch}-{val_loss:.9f}", save_top_k=-1)
    callback = SparsityCallback(METHODS[name](), artifact=tmp_path / "model.safetensors")
    fitting = trainer(tmp_path, callback, checkpoints)
    fitting.fit(model, loader(), validation)
    paths = sorted(tmp_path.glob("epoch=*.ckpt"))
    assert len(paths) == 4
    for path in paths:
        plain = module(seed=1)
        state = torch.load(path, weights_only=True)["state_dict"]
        plain.load_state_dict(state, strict=True)
        validated = float(path.stem.partition("val_loss=")[2])
        (result,) = fitting.test(plain, validation, ckpt_path=path, verbose=False)
        assert result["test_loss"] == pytest.approx(validated, rel=1e-6)
        assert kept(plain) == KEEP or name == "rigl"  # weights that it has just grown are zero
    if name == "learned":
        assert kept(Module.load_from_checkpoint(paths[0])) > KEEP  # it was still being pruned
    assert kept(Module.load_from_checkpoint(paths[-1])) == KEEP  # the masks were final
    saved = probmask.load_into(module(seed=1), tmp_path / "model.safetensors")
    assert equal_states(saved, model)
    assert kept(saved) == KEEP


class Adversaries(Module):
    """Manual optimization: two optimizers, each with its own loss and its own step."""

    automatic_optimization = False

    def __init__(self, *, reverse=False):
        super().__init__()
        self.automatic_optimization = False
        self.reverse = reverse

    def configure_optimizers(self):
        pair = [
            torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[:3], self.net[3:])
        ]
        return pair[::-1] if self.reverse else pair

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        for optimizer in optimizers[::-1] if self.reverse else optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_manual_optimization_with_alternating_optimizers(tmp_path):
    trained = []
    for reverse in (False, True):  # the order of configure_optimizers does not matter
        torch.manual_seed(0)
        model = Adversaries(reverse=reverse)
        callback = SparsityCallback(METHODS["tied"](), seed=3)
        trainer(tmp_path, callback).fit(model, loader(shuffle=False))
        assert callback.summary.kept == kept(model) == KEEP
        trained.append(model)
    assert equal_states(*trained)
    with pytest.raises(probmask.InputError, match="was called after one of the"):
        trainer(tmp_path, SparsityCallback(METHODS["learned"]())).fit(Adversaries(), loader())


class Overflowing(Module):
    """The sixth gradient overflows."""

    def training_step(self, batch, index):
        return self.loss(batch) * (float("inf") if self.global_step == 5 else 1.0)


@pytest.mark.parametrize("name", METHODS)
def test_scaled_gradients_of_fp16(name, tmp_path):
    """The result does not depend on the scale, and an overflow skips an update."""
    trained = []
    for scale in (2.0**4, 2.0**10):
        torch.manual_seed(0)
        model = Overflowing()
        callback, steps = SparsityCallback(METHODS[name](), seed=3), []

        class Count(Callback):
            def on_train_batch_end(self, *_):
                steps.append(callback.sparsifier.now.step)  # noqa: B023

        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        precision = MixedPrecision("16-mixed", "cpu", scaler)
        trainer(tmp_path, callback, Count(), plugins=precision).fit(model, loader())
        assert steps == [1, 2, 3, 4, 5, 5, *range(6, 24)]
        assert scaler.get_scale() == scale / 2
        assert kept(model) == KEEP
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_averaged_weights_are_pruned_at_the_end(batchnorm, tmp_path):
    """SWA exchanges the weights when the training ends, whatever the order of the callbacks."""
    method = probmask.TiedProbMask(sparsity=0.8, freeze_at=0.5)
    callback = SparsityCallback(method)
    model, totals = module(), []
    if not batchnorm:
        model.net[1] = nn.Identity()

    class Total(Callback):
        def on_train_start(self, *_):
            totals.append(callback.sparsifier.now.total_steps)

    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=2)
    trainer(tmp_path, callback, averaging, Total()).fit(model, loader())
    assert totals == [24]  # SWA's additional epoch for BatchNorm makes no update
    assert kept(model) == callback.summary.kept == KEEP
    for index in () if batchnorm else (0, 4):
        weight, average = model.net[index].weight, averaging._average_model.net[index].weight
        assert torch.equal(weight, torch.where(weight != 0, average, 0.0))


def test_masks_of_validation_follow_averaged_weights(tmp_path):
    callback, seen = SparsityCallback(METHODS["tied"]()), []

    class Watch(Callback):
        def on_validation_batch_start(self, trainer, pl_module, *_):
            layer = pl_module.net[0]
            weight = layer._parameters["weight"].detach().abs()
            effective = layer.weight.detach() != 0
            seen.append(bool(weight[effective].min() >= weight[~effective].max()))

    averaging = WeightAveraging(avg_fn=lambda average, new, count: 0.5 * (average + new))
    fitting = trainer(tmp_path, callback, averaging, Watch(), num_sanity_val_steps=0)
    fitting.fit(model := module(), loader(), loader(shuffle=False, batch_size=96))
    assert seen[:3] == [True] * 3  # the largest of the averaged weights; then the masks are final
    assert kept(model) == KEEP


def test_a_finished_network_is_trained_further_with_its_zeros(tmp_path):
    model = module()
    callback = SparsityCallback(METHODS["tied"](), artifact=tmp_path / "model.safetensors")
    fitting = trainer(tmp_path, callback)
    fitting.fit(model, loader())
    zero = model.net[0].weight == 0
    before = model.net[0].weight.clone()
    fitting.fit_loop.max_epochs = 6
    fitting.fit(model, loader())
    assert torch.equal(model.net[0].weight == 0, zero)
    assert not torch.equal(model.net[0].weight, before)
    assert equal_states(probmask.load_into(module(), tmp_path / "model.safetensors"), model)
    fitting.save_checkpoint(tmp_path / "finished.ckpt")
    again = SparsityCallback(METHODS["tied"]())
    resumed = module()
    trainer(tmp_path, again, max_epochs=8).fit(
        resumed, loader(), ckpt_path=tmp_path / "finished.ckpt"
    )
    assert torch.equal(resumed.net[0].weight == 0, zero)
    assert not equal_states(resumed, model)


def test_an_interrupted_training_stays_attached(tmp_path):
    model, callback = module(), SparsityCallback(METHODS["tied"]())
    fitting = trainer(tmp_path, callback, Stop(KeyboardInterrupt()))
    with pytest.raises(SystemExit):
        fitting.fit(model, loader())
    assert callback.sparsifier.now.step == 18
    with pytest.raises(probmask.InputError, match="still has a mask"):
        probmask.save(model, tmp_path / "model.safetensors")
    fitting.callbacks.remove(fitting.callbacks[[type(c) for c in fitting.callbacks].index(Stop)])
    fitting.fit(model, loader())
    assert callback.summary.kept == kept(model) == KEEP


@pytest.mark.parametrize("name", ["learned", "rigl"])
def test_the_checkpoint_of_the_last_update_is_finished(name, tmp_path):
    """A training that is killed between its last checkpoint and its end loses nothing.

    BatchNorm sees the shuffled batches that it would have seen.
    """
    last = ModelCheckpoint(tmp_path, filename="last")
    callbacks = [SparsityCallback(METHODS[name](), data="train") for _ in range(2)]
    trainer(tmp_path, callbacks[0], last).fit(model := module(), loader())
    resumed = module(seed=1)
    trainer(tmp_path, callbacks[1]).fit(resumed, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert equal_states(resumed, model)
    assert kept(resumed) == KEEP


def test_a_dense_training_is_continued_sparse(tmp_path):
    """Only the updates that are left are planned."""
    dense = ModelCheckpoint(tmp_path, filename="dense")
    trainer(tmp_path, dense, max_epochs=2).fit(module(), loader())
    callback = SparsityCallback(METHODS["tied"]())
    fitting = trainer(tmp_path, callback, Stop(RuntimeError()), max_epochs=6)
    with pytest.raises(RuntimeError):
        fitting.fit(module(), loader(), ckpt_path=tmp_path / "dense.ckpt")
    now = callback.sparsifier.now
    assert (now.step, now.total_steps, now.steps_per_epoch) == (6, 24, 6)


def test_two_ranks(tmp_path, monkeypatch):
    """Processes of a fork server skip the shutdown that `reference.two_ranks.leave` describes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = module()
    callback = SparsityCallback(METHODS["learned"](), artifact=tmp_path / "model.safetensors")
    strategy = DDPStrategy(start_method="forkserver")
    fitting = trainer(
        tmp_path, callback, SaveRank(tmp_path), strategy=strategy, devices=2, max_epochs=2
    )
    fitting.fit(model, loader())
    assert kept(model) == KEEP
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    weights = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in weights)
    assert equal_states(probmask.load_into(module(seed=1), tmp_path / "model.safetensors"), model)


class Untrained(Module):
    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_wrong_arguments_are_reported_before_the_training(tmp_path):
    def fit(callback, **settings):
        trainer(tmp_path, callback, **settings).fit(module(), loader())

    tied = METHODS["tied"]()
    with pytest.raises(probmask.InputError, match=r"max_epochs=-1.*pass it as total_steps="):
        fit(SparsityCallback(tied), max_epochs=-1)
    with pytest.raises(probmask.InputError, match=r"ProbMask\(draws=2\)"):
        SparsityCallback(probmask.ProbMask(sparsity=0.8, recipe="paper"))
    with pytest.raises(probmask.InputError, match=r"VRPGE\(draws=2\)"):
        SparsityCallback(probmask.methods.VRPGE(sparsity=0.8))
    with pytest.raises(probmask.InputError, match="pass probe="):
        fit(SparsityCallback(probmask.methods.SNIP(sparsity=0.8)))
    with pytest.raises(probmask.InputError, match="expected a method"):
        SparsityCallback(0.8)
    with pytest.raises(probmask.InputError, match="data='test'"):
        SparsityCallback(tied, data="test")
    with pytest.raises(probmask.InputError, match=r"data=5.*iterable of batches"):
        SparsityCallback(tied, data=5)
    with pytest.raises(probmask.InputError, match="pretrained='yes'"):
        SparsityCallback(tied, pretrained="yes")
    with pytest.raises(probmask.InputError, match="returns no optimizer"):
        trainer(tmp_path, SparsityCallback(tied)).fit(Untrained(), loader())
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(probmask.InputError, match="the file exists"):
        fit(SparsityCallback(tied, artifact=tmp_path / "model.safetensors"))
    with pytest.raises(probmask.InputError, match="No such file or directory"):
        fit(SparsityCallback(tied, artifact=tmp_path / "nowhere" / "model.safetensors"))
    saved = ModelCheckpoint(tmp_path, filename="two")
    trainer(tmp_path, SparsityCallback(tied), saved, max_epochs=2).fit(module(), loader())
    with pytest.raises(probmask.InputError, match=r"training of 12 updates.*total_steps=12"):
        trainer(tmp_path, SparsityCallback(tied)).fit(
            module(), loader(), ckpt_path=tmp_path / "two.ckpt"
        )


def test_frozen_weights_are_masked_or_skipped(tmp_path):
    """Also in a second training, and in one that is resumed."""

    def half_frozen():
        model = module()
        model.net[0].requires_grad_(False)
        return model

    before, last = module().net[0].weight, 32 * 3
    callback = SparsityCallback(METHODS["tied"](), frozen="skip")
    saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    model = half_frozen()
    trainer(tmp_path, callback, saved).fit(model, loader(shuffle=False))
    assert torch.equal(model.net[0].weight, before)
    assert (callback.summary.size, callback.summary.kept) == (last, last - round(0.8 * last))
    again = half_frozen()
    fitted = trainer(tmp_path, SparsityCallback(METHODS["tied"](), frozen="skip"))
    fitted.fit(again, loader(shuffle=False), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert equal_states(again, model)
    trainer(tmp_path, callback).fit(model, loader(shuffle=False))
    assert (callback.summary.size, callback.summary.kept) == (last, last - round(0.8 * last))

    callback, model = SparsityCallback(METHODS["tied"](), frozen="mask"), half_frozen()
    trainer(tmp_path, callback).fit(model, loader(shuffle=False))
    assert kept(model) == callback.summary.kept == KEEP
    stays = model.net[0].weight != 0
    assert torch.equal(model.net[0].weight[stays], before[stays])
    with pytest.raises(probmask.InputError, match=r"SparsityCallback\(frozen='dense'\)"):
        SparsityCallback(METHODS["tied"](), frozen="dense")


def test_methods_that_measure_and_count(tmp_path):
    """A probe is passed on; epochs, FLOPs and patterns follow from the Trainer and the module."""
    model = module()
    snip = probmask.methods.SNIP(sparsity=0.8)
    probe = probmask.Probe(loader(shuffle=False))
    trainer(tmp_path, SparsityCallback(snip, probe=probe)).fit(model, loader())
    assert kept(model) == KEEP
    model = module()
    model.example_input_array = torch.zeros(2, 12)
    method = probmask.TiedProbMask(sparsity=0.8, cost="flops", every="epoch")
    callback = SparsityCallback(method, exclude=["net.4"])
    trainer(tmp_path, callback, max_steps=20).fit(model, loader())
    assert [layer.name for layer in callback.summary.layers] == ["net.0.weight"]


@pytest.mark.filterwarnings("default::probmask.EarlyEndWarning")
def test_fewer_updates_than_planned(tmp_path):
    class Rarely(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            self.manual_backward(self.loss(batch))
            if index % 3 == 2:
                self.optimizers().step()
                self.optimizers().zero_grad()

    fitting = trainer(tmp_path, SparsityCallback(METHODS["tied"]()), max_epochs=1)
    with (
        pytest.warns(probmask.EarlyEndWarning, match="first epoch made 2 updates instead of 6"),
        pytest.warns(probmask.EarlyEndWarning, match="finalize.. was called after 2 of 6 steps"),
    ):
        fitting.fit(Rarely(), loader())


def test_without_lightning_one_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    path = Path(probmask.__file__).parent / "integrations" / "lightning" / "__init__.py"
    spec = importlib.util.spec_from_file_location("without_lightning", path)
    with pytest.raises(probmask.InputError, match=r"pip install .*'probmask\[lightning\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_examples_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
    section = page.partition("## Lightning")[2].partition("## Hugging Face")[0]
    source = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    names = {"torch": torch, "module": module(), "build_module": module, "loader": loader()}
    exec(compile(source, "integrations.md", "exec"), names)
    assert "all: 24 of 480 kept, 95.00 % sparse" in capsys.readouterr().out
    assert names["plain"].net[0].weight.all()
    assert Path("model.safetensors").is_file()
