"""What every method must hold that trains a sparse network from the start, on one small network."""

import copy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import probmask
import probmask.methods
from reference.networks import assert_same_state, sgd, state_of, step

STEPS = 40
SHORT = 18  # for the contract, which trains many times
SIZES = [144, 144, 1536, 36]


def mixed(seed=0):
    """Convolution, grouped convolution, two linear layers; no BatchNorm."""
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
    """A model in training under a method."""

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
        return [active.clone() for active in self.masker.active]

    @property
    def counts(self):
        return [int(active.sum()) for active in self.masker.active]

    @property
    def weights(self):
        return [weight.detach().clone() for weight in self.masker.weights]

    def train(self, some):
        for batch in some:
            step(self.model, self.optimizer, batch)
        return self

    def momentum(self, index):
        return self.optimizer.state[self.masker.weights[index]]["momentum_buffer"]

    def exchanges(self, some):
        """The updates, counted from 0, in which an active weight was replaced."""
        changed = []
        for number, batch in enumerate(some):
            before = self.active
            step(self.model, self.optimizer, batch)
            if any(not torch.equal(old, new) for old, new in zip(before, self.active, strict=True)):
                changed.append(number)
        return changed


def assert_exact_budget(make, **settings):
    """Whenever training ends, exactly the budget is kept, and everything else is zero."""
    for sparsity, stop in ((0.5, SHORT), (0.873, SHORT), (0.95, 5), (0.99, 0)):
        run = Run(make(sparsity=sparsity, **settings), total_steps=SHORT).train(batches(stop))
        summary = run.sparsifier.finalize()
        assert summary.kept == 1860 - round(sparsity * 1860)
        layers = [run.model[i] for i in (0, 2, 5, 7)]
        for layer, counted, mask in zip(layers, summary.layers, run.masker.masks, strict=True):
            assert int(mask.hard.sum()) == counted.kept
            assert not layer.weight[~mask.hard].any()


def assert_budget_throughout(make, **settings):
    """The number of active weights never changes, and inactive ones never move."""
    run = Run(make(sparsity=0.9, **settings), total_steps=SHORT, weight_decay=0.1)
    for batch in batches(SHORT):
        run.train([batch])
        assert sum(run.counts) == 186
        for weight, active in zip(run.weights, run.active, strict=True):
            assert not weight[~active].any()


def assert_resumes(make, make_optimizer=sgd, stops=(4, 11), **settings):
    """Stopped, saved, loaded into a fresh start of another seed: bit for bit the same."""
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


def assert_dense_at_zero(make, **settings):
    """Nothing removed is dense training bit for bit."""
    plain = mixed()
    optimizer = sgd(plain)
    for batch in batches(SHORT):
        step(plain, optimizer, batch)
    run = Run(make(sparsity=0.0, **settings), total_steps=SHORT).train(batches(SHORT))
    assert run.sparsifier.finalize().kept == 1860
    assert_same_state(state_of(run.model), state_of(plain))


def assert_same_seed_same_result(make, **settings):
    """The seed decides, and nothing else; it does decide."""
    one, same, other = (
        Run(make(sparsity=0.9, **settings), total_steps=SHORT, seed=seed).train(batches(SHORT))
        for seed in (3, 3, 4)
    )
    assert_same_state(state_of(one.model), state_of(same.model))
    assert any(not torch.equal(a, b) for a, b in zip(one.active, other.active, strict=True))


def assert_takes_bfloat16(make, **settings):
    """Half precision ends at the budget too."""
    run = Run(make(sparsity=0.9, **settings), model=mixed().bfloat16(), total_steps=SHORT)
    run.train([(images.bfloat16(), labels) for images, labels in batches(SHORT)])
    assert run.sparsifier.finalize().kept == 186


def assert_contract(make, *, constant=True, **settings):
    """All of the above."""
    assert_exact_budget(make, **settings)
    if constant:
        assert_budget_throughout(make, **settings)
    assert_resumes(make, **settings)
    assert_dense_at_zero(make, **settings)
    assert_same_seed_same_result(make, **settings)
    assert_takes_bfloat16(make, **settings)


def train_on_two_ranks(rank):
    """Each rank with batches and first weights of its own; DDP sends the first rank's around."""
    methods = (
        probmask.methods.METHODS[name](sparsity=0.8)
        for name in ("rigl", "set", "snfs", "granet", "dsr", "deepr")
    )
    final = {}
    for method in methods:
        run = Run(method, model=mixed(seed=rank), total_steps=10, seed=None)
        run.model = DistributedDataParallel(run.model)
        run.train(batches(10, seed=50 + rank))
        run.sparsifier.finalize()
        final[method.name] = state_of(run.model.module)
    return final
