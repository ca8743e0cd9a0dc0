"""A small training of one method, and assertions that hold for every such training."""

import io

import torch
from torch import nn

import probmask
from reference.networks import assert_same_state, loss_of, state_of, step

STEPS = 24
SIZES = (72, 144, 64, 24)
SIZE = sum(SIZES)


def network():
    """Return a convolution, a grouped one, a transposed one and a linear layer; no BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def batches(count=STEPS):
    torch.manual_seed(1)
    return [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(count)]


class MaskedRun:
    """A method attached to the network, trained update by update."""

    def __init__(self, method, steps=STEPS, model=None, **optimizer):
        settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4} | optimizer
        self.model = network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)
        self.sparsifier = probmask.attach(
            self.model,
            method,
            optimizer=self.optimizer,
            total_steps=steps,
            steps_per_epoch=4,
            seed=5,
        )
        self.masker = self.sparsifier._masker
        self.masked = self.masker.masked
        self.weights = self.masker.weights
        self.data = batches(steps)

    def go(self, until=None):
        for batch in self.data[self.sparsifier.now.step : until]:
            step(self.model, self.optimizer, batch, self.sparsifier)
        return self

    def backward(self):
        """Compute the gradients of one batch."""
        self.optimizer.zero_grad()
        loss_of(self.model, self.data[0]).backward()

    def effective(self):
        """Return the weights of all sites as the network computes with them."""
        pairs = zip(self.masked, self.weights, strict=True)
        return [masked(weight, self.model.training) for masked, weight in pairs]

    def parts(self):
        return self.model, self.optimizer, self.sparsifier


def assert_exact_budget(method):
    run = MaskedRun(method).go()
    summary = run.sparsifier.finalize()
    assert summary.kept == SIZE - round(method.sparsity * SIZE)
    for weight, layer in zip(run.weights, summary.layers, strict=True):
        assert int(weight.count_nonzero()) == layer.kept
    return summary


def assert_resumes(method, stops=(1, 9, 13, 20, 23)):
    """Assert that a resume after any of these updates is bit-exact, whatever the initial values."""
    whole, saved = MaskedRun(method), []
    for stop in stops:
        whole.go(stop)
        file = io.BytesIO()
        torch.save([part.state_dict() for part in whole.parts()], file)
        saved.append(file)
    whole.go()
    before = state_of(whole.model)
    kept = whole.sparsifier.finalize()
    for stop, file in zip(stops, saved, strict=True):
        second = MaskedRun(method)
        with torch.no_grad():
            for parameter in second.model.parameters():
                parameter.add_(1)
        file.seek(0)
        for part, state in zip(second.parts(), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        assert second.sparsifier.now.step == stop
        second.go()
        assert_same_state(before, state_of(second.model))
        assert second.sparsifier.finalize() == kept
        assert_same_state(state_of(whole.model), state_of(second.model))


def magnitudes(run):
    """Return |w| of all sites in one vector."""
    return torch.cat([weight.detach().abs().flatten() for weight in run.weights])


def joined(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def effective_gradients(run):
    """Return the effective weights of all sites and the gradients of one batch for them."""
    seen = []
    handles = []
    for masked in run.masked:

        def keep(_, __, output):
            output.retain_grad()
            seen.append(output)

        handles.append(masked.register_forward_hook(keep))
    run.backward()
    for handle in handles:
        handle.remove()
    return seen, [weight.grad for weight in seen]
