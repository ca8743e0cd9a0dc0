"""A short training with everything that a method may need: draws, penalty, losses."""

import warnings

import torch

import probmask
from probmask.errors import LayerCollapseWarning
from reference.networks import assert_same_state, build, loss_of, make_batches, sgd, state_of


class SparseTraining:
    """A method attached to one of the small networks."""

    def __init__(self, method, network="depthwise", *, steps=12, seed=3, epochs=None, **settings):
        self.model = build(network)
        self.optimizer = sgd(self.model, **settings)
        self.batches = make_batches(network, steps)
        self.sparsifier = probmask.attach(
            self.model,
            method,
            optimizer=self.optimizer,
            total_steps=steps,
            steps_per_epoch=None if epochs is None else steps // epochs,
            seed=seed,
        )
        self.masker = self.sparsifier._masker
        self.done = 0

    def go(self, until=None):
        """Continue the training, to the end by default."""
        for batch in self.batches[self.done : until]:
            self.gradients(batch)
            self.optimizer.step()
            self.done += 1
        return self

    def gradients(self, batch):
        """Compute the gradients of one update."""
        self.optimizer.zero_grad()
        for share in self.sparsifier.draws():
            loss = loss_of(self.model, batch)
            (share * (loss + self.sparsifier.penalty())).backward()
            self.sparsifier.observe(loss)

    def finish(self):
        """Train to the end; return the final state."""
        self.go()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayerCollapseWarning)
            self.summary = self.sparsifier.finalize()
        return state_of(self.model)


def assert_exact_budget(method, network, **settings):
    training = SparseTraining(method, network, **settings)
    final = training.finish()
    size = training.summary.size
    assert training.summary.kept == size - round(method.sparsity * size)
    for layer in training.summary.layers:
        assert int(final[layer.name].count_nonzero()) <= layer.kept
    assert all(torch.isfinite(value).all() for value in final.values())
    assert not any(module._forward_hooks for module in training.model.modules())


def assert_resumes(method, network="depthwise", *, after=(1, 7, 11), **settings):
    whole = SparseTraining(method, network, **settings).finish()
    for stop in after:
        first = SparseTraining(method, network, **settings).go(stop)
        second = SparseTraining(method, network, **{**settings, "seed": 99})
        second.model.load_state_dict(first.model.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.sparsifier.load_state_dict(first.sparsifier.state_dict())
        second.done = stop
        assert_same_state(whole, second.finish())
