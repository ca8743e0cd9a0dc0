"""A small module for Lightning, its data, and a training that a child process runs."""

import os
import signal
import sys

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import probmask
from probmask.integrations.lightning import SparsityCallback

METHODS = {
    "tied": lambda: probmask.TiedProbMask(sparsity=0.8),
    "learned": lambda: probmask.ProbMask(sparsity=0.8),
    "penalty": lambda: probmask.methods.L0(sparsity=0.8),
    "rigl": lambda: probmask.methods.RigL(sparsity=0.8),  # zeroes weights when it is attached
}


def network():
    return nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)
    )


class Module(lightning.LightningModule):
    """Everything that makes a resume hard: dropout, BatchNorm, momentum, a scheduler."""

    def __init__(self, optimizer=torch.optim.SGD, **settings):
        super().__init__()
        self.net = network()
        self.optimizer, self.settings = optimizer, {"lr": 0.05, **settings}

    def forward(self, inputs):
        return self.net(inputs)

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.cross_entropy(self(inputs), targets)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, index):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), **self.settings)
        steps = self.trainer.estimated_stepping_batches  # sets up the data, as many modules do
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


def data(size=96):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def loader(*, shuffle=True, batch_size=16):
    return DataLoader(data(), batch_size, shuffle=shuffle)


class Resumable:
    """Batches in the order of a random permutation; their position is part of checkpoints."""

    def __init__(self):
        self.batches = list(loader(shuffle=False))
        self.order, self.next = None, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        if self.next in (0, len(self)):
            self.order, self.next = torch.randperm(len(self)).tolist(), 0
        while self.next < len(self):
            self.next += 1
            yield self.batches[self.order[self.next - 1]]

    def state_dict(self):
        return {"order": self.order, "next": self.next}

    def load_state_dict(self, state):
        self.order, self.next = state["order"], state["next"]


def module(seed=0, **settings):
    torch.manual_seed(seed)
    return Module(**settings)


def trainer(directory, *callbacks, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual = {"accelerator": "cpu", "max_epochs": 4, "log_every_n_steps": 1, **quiet}
    if not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        usual["enable_checkpointing"] = False
    return lightning.Trainer(
        default_root_dir=directory, callbacks=list(callbacks), **{**usual, **settings}
    )


class SaveRank(Callback):
    """Save the network of each rank."""

    def __init__(self, directory):
        self.directory = directory

    def on_fit_end(self, trainer, pl_module):
        torch.save(pl_module.state_dict(), self.directory / f"rank{trainer.global_rank}.pt")


class Kill(Callback):
    """Kill this process in the middle of an epoch, as a power failure does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)


def train(directory, *others, ckpt_path=None):
    """Train with learned probabilities; save a checkpoint after each epoch."""
    model = module(optimizer=torch.optim.AdamW)
    torch.manual_seed(5 if ckpt_path is None else 6)
    checkpoints = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    sparsity = SparsityCallback(METHODS["learned"](), data="train")
    fitted = trainer(directory, sparsity, checkpoints, *others)
    fitted.fit(model, loader(), loader(shuffle=False), ckpt_path=ckpt_path)
    return model, sparsity.summary


if __name__ == "__main__":
    train(sys.argv[1], Kill())
