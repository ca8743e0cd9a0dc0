"""Methods that measure before they prune, on one rank or several; spawned processes import this."""

import probmask
from probmask import Probe
from probmask.methods.grasp import GraSP
from probmask.methods.magnitude import Magnitude
from probmask.methods.snip import SNIP
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train

STEPS = 8


def masks(method, batches, seed=0):
    model = build("mlp", seed).double()
    sparsifier = probmask.attach(model, method, total_steps=3, probe=Probe(batches), seed=1)
    return [site.weight != 0 for site in sparsifier.sites]


def look(rank):
    both = [(x.double(), y) for x, y in make_batches("mlp", 2, seed=3)]
    own = [both[rank]]
    grasp = {"sparsity": 0.8, "samples_per_class": None}
    return {
        "snip": (masks(SNIP(sparsity=0.8), own), masks(SNIP(sparsity=0.8, batches=2), both)),
        "grasp": (masks(GraSP(**grasp), own), masks(GraSP(**grasp, passes=2), both)),
        "other weights": [
            masks(method, own, seed=rank)
            for method in (
                SNIP(sparsity=0.8),
                GraSP(sparsity=0.8),
                Magnitude(sparsity=0.8, prune_at=0),
            )
        ],
    }


def attached(method, name="conv", *, model=None, seed=5, probe=None):
    """Attach a method that needs a probe; return model, optimizer and sparsifier."""
    model = build(name) if model is None else model
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        method,
        optimizer=optimizer,
        total_steps=STEPS,
        probe=probe or Probe(make_batches(name, 8, seed=3)),
        seed=seed,
    )
    return model, optimizer, sparsifier


def masks_of(sparsifier):
    return [masked.mask for masked in sparsifier._masker.masked]


def assert_dense_without_data(method):
    """Assert that sparsity 0 is dense training and needs no data."""
    model, dense = build("conv"), build("conv")
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS)
    batches = make_batches("conv", STEPS)
    train(model, optimizer, batches)
    train(dense, sgd(dense), batches)
    sparsifier.finalize()
    assert_same_state(state_of(model), state_of(dense))
