"""Models and arguments that `runtime.compile` refuses: one line that says what to do."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import probmask
from probmask.errors import InputError

X = torch.zeros(2, 3)
STEPS = torch.randn(2, 5, 3)


class Applied(nn.Module):
    """A module with a linear layer and a recurrent one, and any `forward`."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.cells = nn.Linear(3, 3), nn.LSTM(3, 4, batch_first=True)
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)


def packed(self, x, lengths):
    sequence = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.cells(sequence)[0], batch_first=True)[0]


def branching(branch):
    return lambda self, x: torch.cond(x.sum() > 0, lambda y: y * 2, branch, (self.linear(x),))


def quantized():
    model = nn.Linear(3, 3)
    probmask.quantize(model, bits=4)
    return model


MODELS = {
    "branches": (
        Applied(lambda self, x: x if x.sum() > 0 else -x),
        X,
        "operations forward runs depends on the values of a tensor (test_compile_errors.py, line",
    ),
    "unchanged": (Applied(branching(lambda y: y)), X, "torch.cond returns one of its inputs"),
    "view": (Applied(branching(lambda y: y.flatten().view(2, 3))), X, "torch.cond returns one"),
    "packed": (
        Applied(lambda self, x: packed(self, x, [5, 3])),
        STEPS,
        "packed sequences cannot be compiled; pass padded tensors.",
    ),
    "packed by an input": (Applied(packed), (STEPS, torch.tensor([3, 5])), "packed sequences"),
    "quantize": (quantized(), X, "weight is still trained as integers (probmask.quantize); call"),
    "double": (nn.Linear(3, 3), X.double(), "does not run on the example: mat1 and mat2 must have"),
    "shape": (nn.Linear(4, 3), X, "does not run on the example: mat1 and mat2 shapes cannot be"),
    "too many": (nn.Linear(3, 3), (X, X), "takes 2 positional arguments but 3 were given"),
    "meta": (nn.Linear(3, 3, device="meta"), X, "Linear): weight has no values yet"),
    "lazy": (nn.LazyLinear(3), X, "Linear): weight has no values yet"),
    "no model": (3, X, "takes a torch.nn.Module or the path"),
    "no file": ("none.safetensors", X, "no such file"),
    "no example": (nn.Linear(3, 3), "x", "the example is a dense tensor, an array"),
}


@pytest.mark.parametrize("layers", ["measured", "sparse"])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_compiled_raise(name, layers, capfd):
    model, x, message = MODELS[name]
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        probmask.runtime.compile(model, x, layers=layers)
    assert "\n" not in str(caught.value)
    printed = capfd.readouterr()
    assert not printed.out
    assert not printed.err


@pytest.mark.parametrize(
    ("threads", "rule"), [(0, "at least 1"), ("2", "at least 1"), (100_000, "from 1 to 1024")]
)
def test_impossible_numbers_of_threads_raise(threads, rule):
    message = rf"threads={threads!r}\): must be a number of threads, .*{rule}"
    with pytest.raises(InputError, match=message):
        probmask.runtime.compile(nn.Linear(3, 3), X, threads=threads)


def test_what_resembles_these_models_compiles():
    """A branch that returns a copy, and masks that are frozen but not rounded."""
    frozen = nn.Linear(3, 3)
    frozen.weight.data[0] = 0
    probmask.freeze_masks(frozen)
    for model in (Applied(branching(lambda y: y.clone())), frozen):
        engine = probmask.runtime.compile(model, X, threads=1)
        for x in (torch.ones(2, 3), -torch.ones(2, 3)):
            with torch.no_grad():
                assert torch.allclose(engine(x), model(x), atol=1e-6)
