"""Engines in other processes and files: pickles, copies, torch.save."""

import copy
import io
import multiprocessing
import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

import probmask
from probmask import InputError
from runtime.networks import EverythingInOne, masked


class Branches(nn.Module):
    """Nodes that PyTorch runs: a branch, a copy with a memory format, LayerNorm."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.inner = inner or (lambda y: 2 * y)

    def forward(self, x):
        x = self.norm(x)
        y = torch.cond(x.sum() > 0, lambda y: self.linear(y) + 1, self.inner, (x,))
        return {"pair": (y, y.transpose(0, 1).contiguous()), "none": None, "number": 3}


def by_torch_save(engine):
    file = io.BytesIO()
    torch.save(engine, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_pickle(engine):
    return pickle.loads(pickle.dumps(engine))


@pytest.fixture(scope="module", params=["kernels", "PyTorch"])
def compiled(request):
    torch.manual_seed(0)
    if request.param == "kernels":
        model, x = masked(EverythingInOne(), 0.8), torch.randn(3, 3, 31, 29)
    else:
        model, x = Branches(), torch.randn(2, 5, 16)
    return probmask.runtime.compile(model, x, threads=2, layers="sparse"), x


@pytest.mark.parametrize("transfer", [by_pickle, by_torch_save, copy.deepcopy, copy.copy])
def test_copies_give_the_same_bits(compiled, transfer):
    engine, x = compiled
    other = transfer(engine)
    torch.testing.assert_close(other(x), engine(x), rtol=0, atol=0)
    assert (other.choices, other.threads) == (engine.choices, 2)
    assert other._threads is not engine._threads
    again = transfer(other)  # what was restored can be transferred again
    torch.testing.assert_close(again(x[:1]), engine(x[:1]), rtol=0, atol=0)


class Tied(nn.Module):
    """One weight that is read by a kernel and by PyTorch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(600, 600)

    def forward(self, x):
        return torch.stack([self.linear(x), x @ self.linear.weight])


def test_a_spawned_process_gives_the_same_bits():
    """Sending a tensor moves its memory. The caller's example and the weights must not dangle."""
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(0))
    engine = probmask.runtime.compile(masked(Tied(), 0.5), x, threads=2, layers="sparse")
    array, expected = x.numpy(), engine(x).numpy()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(engine, (array,))
    assert array.ctypes.data == x.data_ptr()
    assert np.array_equal(found, expected)
    assert np.array_equal(copy.copy(engine)(array), expected)


def test_a_pickle_holds_each_weight_once():
    model = masked(nn.Linear(300, 300), 0.9)
    engine = probmask.runtime.compile(model, torch.zeros(1, 300), layers="sparse")
    assert len(pickle.dumps(engine)) < 1.05 * 4 * 300 * 300


def test_what_cannot_be_pickled_is_named():
    pair = namedtuple("Pair", "a b")  # pickle cannot find a local class

    class Local(nn.Module):
        def forward(self, x):
            return pair(x + 1, x)

    def nested(y):
        return torch.cond(y.sum() > -1, lambda z: 3 * z, lambda z: 5 * z, (y,))

    x = torch.randn(2, 5, 16)
    for model, message in (
        (Local(), "what the model returns"),
        (Branches(nested), "a branch of its network"),
    ):
        engine = probmask.runtime.compile(model, x, layers="dense")
        with pytest.raises(InputError, match=f"the engine cannot be pickled.*{message}"):
            pickle.dumps(engine)
        torch.testing.assert_close(copy.deepcopy(engine)(x), engine(x), rtol=0, atol=0)


def test_an_operation_that_is_not_registered_is_named():
    @torch.library.custom_op("probmask_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)

    class Custom(nn.Module):
        def forward(self, x):
            return torch.ops.probmask_tests.twice(x)

    engine = probmask.runtime.compile(Custom(), torch.ones(2))
    pickled = pickle.dumps(engine)
    assert torch.equal(pickle.loads(pickled)(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(InputError, match=r"operation torch\.ops\.probmask_tests\.other"):
        pickle.loads(pickled.replace(b"probmask_tests.twice.", b"probmask_tests.other."))
