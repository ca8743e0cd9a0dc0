"""A small training of a method that trains a sparse network from the start."""

import copy

import torch
from torch import nn

import probmask
from probmask.methods.families.stored import activate_, active_masks
from reference.networks import assert_same_state, sgd, state_of, step

STEPS = 40
SHORT = 18
SIZES = [144, 144, 1536, 36]


def mixed(seed=0):
    """Return a convolution, a grouped one and two linear layers; no BatchNorm."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 12),
        nn.Tanh(),
        nn.Linear(12, 3),
    )


def batches(count=STEPS, seed=1):
    torch.manual_seed(seed)
    return [(torch.randn(8, 2, 6, 6), torch.randint(3, (8,))) for _ in range(count)]


class Run:
    """A model trained with a method."""

    def __init__(self, method, *, model=None, total_steps=STEPS, seed=3, make=sgd, **settings):
        self.model = mixed() if model is None else model
        self.optimizer = make(self.model, **settings)
        self.sparsifier = probmask.attach(
            self.model,
            method,
            optimizer=self.optimizer,
            total_steps=total_steps,
            steps_per_epoch=4,
            seed=seed,
        )
        self.masker = self.sparsifier._masker

    @property
    def active(self):
        return [active.clone() for active in active_masks(self.masker.masked)]

    @property
    def counts(self):
        return [int(active.sum()) for active in active_masks(self.masker.masked)]

    @property
    def weights(self):
        return [weight.detach().clone() for weight in self.masker.weights]

    def activate(self, active):
        """Make these the active weights."""
        activate_(self.masker.masked, self.masker.weights, active)

    def train(self, some):
        for batch in some:
            step(self.model, self.optimizer, batch)
        return self

    def momentum(self, index):
        return self.optimizer.state[self.masker.weights[index]]["momentum_buffer"]

    def exchanges(self, some):
        """Return the updates, counted from 0, in which an active weight was replaced."""
        changed = []
        for number, batch in enumerate(some):
            before = self.active
            step(self.model, self.optimizer, batch)
            if any(not torch.equal(old, new) for old, new in zip(before, self.active, strict=True)):
                changed.append(number)
        return changed


def assert_budget_throughout(make, **settings):
    """Assert that the number of active weights is constant and inactive weights stay zero."""
    run = Run(make(sparsity=0.9, **settings), total_steps=SHORT, weight_decay=0.1)
    for batch in batches(SHORT):
        run.train([batch])
        assert sum(run.counts) == 186
        for weight, active in zip(run.weights, run.active, strict=True):
            assert not weight[~active].any()


def assert_resumes(make, make_optimizer=sgd, stops=(4, 11), **settings):
    """Assert that a training resumed from another seed's initial values ends bit-identically."""
    method, data = make(sparsity=0.9, **settings), batches(SHORT)
    common = {"total_steps": SHORT, "make": make_optimizer}
    whole = Run(method, **common).train(data)
    for stop in stops:
        first = Run(method, **common).train(data[:stop])
        parts = (first.model, first.optimizer, first.sparsifier)
        saved = copy.deepcopy([part.state_dict() for part in parts])
        second = Run(method, model=mixed(seed=5), seed=99, **common)
        for part, state in zip(
            (second.model, second.optimizer, second.sparsifier), saved, strict=True
        ):
            part.load_state_dict(state)
        second.train(data[stop:])
        assert_same_state(state_of(whole.model), state_of(second.model))
        for one, other in zip(whole.active, second.active, strict=True):
            assert torch.equal(one, other)
