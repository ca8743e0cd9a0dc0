"""Train a sparse network with Lightning: one callback is added to the Trainer.

The module, the data and the Trainer are those of any Lightning project. At the end, the network
has exactly 5 % of its weights, is tested, and is saved as an artifact.

    python examples/lightning_trainer.py [--quick]
"""

import logging
import sys
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import probmask
from probmask.integrations.lightning import SparsityCallback

EPOCHS = 2 if "--quick" in sys.argv else 25
# Lightning's own messages would hide what this example shows.
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class DigitClassifier(lightning.LightningModule):
    """A small convolutional network for images of 8 × 8 pixels."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 10),
        )

    def forward(self, images):
        """Return the scores of the classes."""
        return self.net(images)

    def training_step(self, batch, batch_idx):
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def test_step(self, batch, batch_idx):
        """Log the fraction of correct answers."""
        images, labels = batch
        self.log("test_accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        """Train with SGD and a one-cycle schedule."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main():
    """Train, test, and load the artifact."""
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [0.8, 0.2])
    train_loader = DataLoader(train, batch_size=64, shuffle=True)
    test_loader = DataLoader(test, batch_size=360)

    module = DigitClassifier()
    sparsity = SparsityCallback(
        probmask.TiedProbMask(sparsity=0.95),
        data="train",  # re-estimates the BatchNorm statistics at the end
        artifact="digits.safetensors",
        overwrite=True,
    )
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[sparsity],  # the line that is added
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train_loader)
    (result,) = trainer.test(module, test_loader, verbose=False)
    print(sparsity.summary)
    print(f"test accuracy: {100 * result['test_accuracy']:.1f} %")

    loaded = probmask.load_into(DigitClassifier(), "digits.safetensors").eval()
    with torch.no_grad():
        same = torch.equal(loaded(images[:8]), module.eval()(images[:8]))
    print(f"digits.safetensors loads into a plain module: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
