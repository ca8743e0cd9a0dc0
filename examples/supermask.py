"""Find a supermask: a subnetwork of random, untrained weights that classifies digits.

Only the probabilities of the masks are trained. The weights keep their initial values.

    python examples/supermask.py [--quick]
"""

import sys

import torch
from torch import nn

import probmask
from probmask.data import load_data
from probmask.models import smallconv

torch.set_num_threads(1)  # faster for a network as small as this one
QUICK = "--quick" in sys.argv
EPOCHS, WIDTH, BATCH = (2, 8, 256) if QUICK else (25, 32, 64)
DIGITS = load_data("digits")


def accuracy(model):
    """Return the percentage of test images that the model classifies correctly."""
    model.eval()
    with torch.no_grad():
        (batch,) = DIGITS.testing(batch_size=DIGITS.test_size)
        return 100 * (model(batch.inputs).argmax(1) == batch.labels).float().mean().item()


def main():
    """Train masks over random weights, and show that no weight has changed."""
    torch.manual_seed(0)
    model = smallconv(width=WIDTH)
    print(f"random weights: {accuracy(model):.1f} %")
    # The optimizer trains BatchNorm. ProbMask trains the probabilities itself.
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.SGD(norms, lr=0.1, momentum=0.9)
    steps = DIGITS.steps_per_epoch(BATCH)
    sparsifier = probmask.attach(
        model,
        probmask.ProbMask(sparsity=0.5, train_weights=False),
        optimizer=optimizer,
        total_steps=EPOCHS * steps,
        steps_per_epoch=steps,
    )
    # attach() has reinitialized the weights; from here on they do not change.
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for epoch in range(EPOCHS):
        model.train()
        for batch in DIGITS.training(epoch, batch_size=BATCH, seed=0):
            optimizer.zero_grad()
            for weight in sparsifier.draws():  # several masks per update
                loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
                (weight * loss).backward()
                sparsifier.observe(loss)
            optimizer.step()
    data = DIGITS.training(EPOCHS, batch_size=BATCH, seed=0)
    summary = sparsifier.finalize(data=(batch.inputs for batch in data))
    print(summary)
    print(f"half of the random weights: {accuracy(model):.1f} %")
    changed = [
        name
        for name, weight in model.named_parameters()
        if weight.dim() > 1 and not torch.equal(weight[weight != 0], before[name][weight != 0])
    ]
    print(f"weights that changed: {changed or 'none'}")


if __name__ == "__main__":
    main()
