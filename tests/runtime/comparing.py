"""Compare an engine with the model that it was compiled from."""

import copy

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import probmask
from probmask.runtime.plan.partition import Choices

# Tolerances that docs/performance.md promises, relative to the largest output.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.02, torch.float16: 0.01}


def assert_same(model, *inputs, others=(), tolerance=None):
    """Check the engine, all on the kernels and all in PyTorch, against the model; return it."""
    model = model.eval()
    engine = probmask.runtime.compile(model, copy.deepcopy(inputs), layers="sparse")
    on_kernels = engine.choices
    for choices in (Choices(frozenset(), {}), on_kernels):
        engine.use(choices)
        for given in (inputs, *others):
            with torch.no_grad():
                expected = model(*copy.deepcopy(given))
            assert_close(engine(*copy.deepcopy(given)), expected, tolerance)
    return engine


def assert_close(found, expected, tolerance=None):
    """Check equality up to rounding, relative to the largest; NaN and infinity have to match."""
    ours, our_shape = pytree.tree_flatten(found)
    theirs, their_shape = pytree.tree_flatten(expected)
    assert our_shape == their_shape
    for mine, wanted in zip(ours, theirs, strict=True):
        if not isinstance(wanted, Tensor):
            assert mine == wanted
            continue
        assert (mine.shape, mine.dtype) == (wanted.shape, wanted.dtype)
        finite = wanted.isfinite()
        assert torch.equal(finite, mine.isfinite())
        assert torch.equal(mine[~finite].isnan(), wanted[~finite].isnan())
        largest = max([1e-30, *wanted[finite].abs().flatten().tolist()])
        allowed = (tolerance or TOLERANCES.get(wanted.dtype, 0)) * largest
        assert all(d <= allowed for d in (mine - wanted)[finite].abs().flatten().tolist())
