"""The callback for Lightning's Trainer: trainings equal those of an own loop, and are resumed."""

import os
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

    from integrations.lightning_training import (
        METHODS,
        Module,
        data,
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
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
SIZE = 12 * 32 + 32 * 3
KEEP = SIZE - round(0.8 * SIZE)


def equal_states(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def kept(model):
    return int(model.net[0].weight.count_nonzero() + model.net[4].weight.count_nonzero())


def own_loop(model, method, batches, *, epochs, accumulate=1, clip=None, penalty=True):
    """Train as `Trainer` does, with the public functions of probmask."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
    steps = -(-len(batches) // accumulate)
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
            loss = model.loss(batch) + (sparsifier.penalty() if penalty else 0.0)
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0 or index + 1 == len(batches):
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
        scheduler.step()
    sparsifier.finalize(data=batches)
    return model


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 4, "gradient_clip_val": 0.1}])
def test_trainings_equal_those_of_an_own_loop(name, settings, tmp_path):
    ours, theirs = module(), module()
    batches = list(loader(shuffle=False))
    torch.manual_seed(7)
    own_loop(
        ours,
        METHODS[name](),
        batches,
        epochs=4,
        accumulate=settings.get("accumulate_grad_batches", 1),
        clip=settings.get("gradient_clip_val"),
    )
    torch.manual_seed(7)
    callback = SparsityCallback(METHODS[name](), data="train", seed=3)
    trainer(tmp_path, callback, **settings).fit(theirs, batches)
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
