"""The files of PyTorch's exporters, for one batch size or any, compared with ONNX Runtime."""

import logging
import re

import numpy as np
import pytest
import torch
from onnx import helper
from torch import nn
from torch.nn import functional

import probmask
from probmask import runtime
from runtime.test_from_onnx import ROWS, by_onnxruntime, encoder, exported, f, file_of, i, sparse
from runtime.test_images import Block


class Decoder(nn.Module):
    """RMSNorm and causal attention with two heads of keys for four of queries."""

    def __init__(self):
        super().__init__()
        self.norm, self.query, self.out = nn.RMSNorm(16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.key, self.value = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        h = self.norm(x)
        heads = [layer(h).unflatten(2, (-1, 4)) for layer in (self.query, self.key, self.value)]
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class PaddedByItsWidth(nn.Module):
    """The pads and the size of the result are computed from the size of the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        h = functional.pad(self.layer(x), (0, 16 - x.shape[-1] % 16))
        return functional.interpolate(h, size=(h.shape[2] * 2, h.shape[3] * 3))


def convnext():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Block(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def padded_shortcuts():
    return probmask.models.resnet14(width=4)


# The network, the shape of one input, and the exporter's settings.
CASES = {
    "padded shortcuts, opset 11": (padded_shortcuts, (3, 32, 32), False, 11),
    "padded shortcuts, opset 17": (padded_shortcuts, (3, 32, 32), False, 17),
    "LayerNorm, opset 13": (convnext, (3, 9, 9), False, 13),
    "encoder, old": (encoder, (9, 16), False, 17),
    "encoder, new": (encoder, (9, 16), True, 18),
    "decoder, new": (Decoder, (7, 16), True, 18),
    "sizes, old": (PaddedByItsWidth, (3, 9, 12), False, 17),
}


# A batch of one leaves open which size of a transformer's reshapes contains the batch.
FILES = [*((case, fixed) for case in CASES for fixed in (2, 0)), ("padded shortcuts, opset 17", 1)]


@pytest.mark.parametrize(("case", "fixed"), FILES)
def test_files_run_on_the_kernels_for_any_batch(tmp_path, case, fixed):
    """Also if the file fixes the batch size: only in the shapes of its reshapes."""
    build, shape, dynamo, opset = CASES[case]
    model = sparse(build())
    batch = () if fixed else (0,)
    example = (torch.randn(fixed or 2, *shape),)
    path = exported(model, tmp_path / "m.onnx", example, dynamo=dynamo, opset=opset, batch=batch)
    engine = runtime.compile(path, layers="sparse", threads=1)
    for n in (1, 2, 3):
        x = torch.randn(n, *shape)
        with torch.no_grad():
            torch.testing.assert_close(engine(x), model(x), rtol=1e-3, atol=1e-4)
        if fixed in (n, 0):
            expected = by_onnxruntime(path, x.numpy())[0]
            np.testing.assert_allclose(engine(x.numpy()), expected, rtol=1e-3, atol=1e-4)
    assert {row["runs"] for row in engine.describe()} == {"kernels"}


FIXED = {
    "the rows are mixed": (
        [
            helper.make_node("Reshape", ["x", "shape"], ["a"], name="/Reshape"),
            helper.make_node("Softmax", ["a"], ["y"], axis=0),
        ],
        {"shape": i(2, 3, 2)},
        r"the Reshape operator `/Reshape` has the constant shape \[2, 3, 2\]",
    ),
    "a constant for each row": (
        [helper.make_node("Add", ["x", "rows"], ["y"])],
        {"rows": f(2, 6)},
        r"the Add operator `y`: The size of tensor a",
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_the_operator_that_fixes_the_batch_size_is_named(tmp_path, caplog, case):
    nodes, constants, named = FIXED[case]
    path = file_of(tmp_path / "m.onnx", nodes, {"x": ROWS}, constants, batch=2)
    with caplog.at_level(logging.WARNING, "probmask"):
        engine = runtime.compile(path, layers="sparse", threads=1)
    pattern = rf"fixes the batch size at 2 \({named}"
    assert re.search(pattern, caplog.text)
    np.testing.assert_allclose(engine(ROWS), by_onnxruntime(path, ROWS)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(probmask.errors.InputError, match=pattern):
        engine(np.concatenate([ROWS, ROWS]))
