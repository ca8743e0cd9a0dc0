"""Train a sparse network in your own loop: three lines are added to a dense training.

python examples/own_loop.py [--quick]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import probmask
from probmask.data import load_data
from probmask.models import smallconv

torch.set_num_threads(1)  # faster for a network as small as this one
QUICK = "--quick" in sys.argv
EPOCHS, WIDTH, BATCH = (2, 8, 256) if QUICK else (20, 32, 64)
DIGITS = load_data("digits")
STEPS_PER_EPOCH = DIGITS.steps_per_epoch(BATCH)


def accuracy(model):
    """Return the percentage of test images that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        (batch,) = DIGITS.testing(batch_size=DIGITS.test_size)
        return 100 * (model(batch.inputs).argmax(1) == batch.labels).float().mean().item()


def main():
    """Train at 95 % sparsity, finish, save, and load the network again."""
    torch.manual_seed(0)
    model = smallconv(width=WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    total = EPOCHS * STEPS_PER_EPOCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)

    # The first added line: from here on, every optimizer.step() also updates the masks.
    sparsifier = probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.95),
        optimizer=optimizer,
        total_steps=total,
        steps_per_epoch=STEPS_PER_EPOCH,
    )
    for epoch in range(EPOCHS):
        model.train()
        for batch in DIGITS.training(epoch, batch_size=BATCH, seed=0):
            loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4:
            sparsity = 100 * sparsifier.metrics()["expected_sparsity"]
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, sparsity {sparsity:.1f} %")

    # The second: the weights get their zeros, and BatchNorm its new statistics.
    training_data = DIGITS.training(EPOCHS, batch_size=BATCH, seed=0)
    summary = sparsifier.finalize(data=(batch.inputs for batch in training_data))
    # The third: a compact file.
    probmask.save(model, "digits.safetensors", overwrite=True)

    print(summary)
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    size = Path("digits.safetensors").stat().st_size
    print(f"digits.safetensors: {size:,} bytes instead of {dense:,}")
    loaded = probmask.load_into(smallconv(width=WIDTH), "digits.safetensors")
    print(f"accuracy: {accuracy(model):.1f} %, of the loaded file: {accuracy(loaded):.1f} %")


if __name__ == "__main__":
    main()
