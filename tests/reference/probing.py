"""What a rank finds by looking at data; importable, as processes that are spawned need it."""

import probmask
from probmask import Probe
from probmask.methods.grasp import GraSP
from probmask.methods.magnitude import Magnitude
from probmask.methods.snip import SNIP
from reference.networks import build, make_batches


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
