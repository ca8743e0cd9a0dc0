"""The kernels agree with PyTorch up to rounding in single precision."""

import numpy as np
import pytest
import torch
from torch import nn

import probmask
from probmask import models
from probmask.runtime.kernels.operation_table import Field
from probmask.runtime.plan.partition import Choices, candidates, steps_of
from runtime.comparing import assert_same
from runtime.networks import EverythingInOne, Wide, masked, one_dimensional
from runtime.rearranging import REARRANGING

# The tolerance that docs/performance.md promises, relative to the largest output.
TOLERANCE = 2e-5
BATCHES = (1, 3, 64)

PAPER = {
    "conv4": (lambda: models.conv4(width=8), (3, 32, 32)),
    "vgg19": (lambda: models.vgg19(width=8), (3, 32, 32)),
    "resnet32": (lambda: models.resnet32(width=8), (3, 32, 32)),
    "mobilenetv1": (lambda: models.mobilenetv1(width=8, classes=20), (3, 65, 49)),
    "resnet50": (lambda: models.resnet50(width=8, classes=20), (3, 64, 64)),
}


def images(shape, batch, seed=1):
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def assert_agrees(engine, model, x):
    with torch.no_grad():
        expected = model(x)
    found = engine(x)
    for ours, theirs in zip(leaves(found), leaves(expected), strict=True):
        assert ours.shape == theirs.shape
        largest = max(1e-6, float(theirs.abs().max())) if theirs.numel() else 1.0
        assert float((ours - theirs).abs().max() if theirs.numel() else 0.0) <= TOLERANCE * largest


def leaves(output):
    return list(output.values()) if isinstance(output, dict) else [output]


def on_kernels(model, x, *, threads=1, ungrouped=None):
    """Compile all nodes for the kernels; run those from ``ungrouped`` on in groups of images."""
    engine = probmask.runtime.compile(model, x, threads=threads, layers="sparse")
    if ungrouped is not None:
        regroup(engine, ungrouped)
    return engine


def regroup(engine, ungrouped):
    steps = steps_of(engine.network, candidates(engine.network))
    counts = {s.nodes[0].name: min(ungrouped, len(s.nodes)) for s in steps if s.sparse}
    engine.use(Choices(engine.choices.sparse, counts))


@pytest.mark.parametrize("name", PAPER)
def test_networks_of_the_paper(name):
    build, shape = PAPER[name]
    torch.manual_seed(0)
    model = masked(build(), 0.9)
    engine = on_kernels(model, images(shape, 2))
    assert engine.choices.sparse == {node.name for node in engine.network.nodes}
    for batch in BATCHES:
        assert_agrees(engine, model, images(shape, batch))
    regroup(engine, len(engine.network.nodes) // 2)
    assert_agrees(engine, model, images(shape, 17))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("ungrouped", [0, 5, None])
def test_every_kind_of_layer(threads, ungrouped):
    torch.manual_seed(0)
    model = masked(EverythingInOne(), 0.5)
    engine = on_kernels(model, images((3, 37, 41), 2), threads=threads, ungrouped=ungrouped)
    for batch in (1, 3, 40):
        assert_agrees(engine, model, images((3, 37, 41), batch))


@pytest.mark.parametrize("name", REARRANGING)
def test_elements_that_move(name):
    torch.manual_seed(0)
    build, shape = REARRANGING[name]
    others = [(images(shape, batch),) for batch in (1, 3, 40)]
    engine = assert_same(masked(build(), 0.5), images(shape, 2), others=others)
    assert engine.network.batch_fixed_by == ""


@pytest.mark.parametrize("size", [(32, 32), (31, 45), (16, 64)])
@pytest.mark.parametrize("sparsity", [0.5, 0.95])
@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_input_channels(size, sparsity, threads):
    torch.manual_seed(0)
    model = masked(Wide(), sparsity)
    engine = on_kernels(model, images((3, *size), 2), threads=threads)
    table = engine._schedule._tasks[0].run.single.program.table
    assert table[:, Field.BLOCKS].max() > 1
    for batch in (1, 3):
        assert_agrees(engine, model, images((3, *size), batch))
    regroup(engine, 0)
    assert_agrees(engine, model, images((3, *size), 17))


@pytest.mark.parametrize("sparsity", [0.0, 0.7, 1.0])
def test_one_dimension(sparsity):
    torch.manual_seed(0)
    model = masked(one_dimensional(), sparsity)
    engine = on_kernels(model, images((3, 50), 2))
    for batch in BATCHES:
        assert_agrees(engine, model, images((3, 50), batch))


def test_a_transformer_layer():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    model = masked(layer, 0.9)
    engine = on_kernels(model, torch.randn(2, 5, 32))
    assert len(engine.choices.sparse) >= 4  # the linear layers; attention stays in PyTorch
    for batch in BATCHES:
        assert_agrees(engine, model, images((5, 32), batch))


@pytest.mark.parametrize("batch", BATCHES)
def test_layers_and_rows_without_weights(batch):
    torch.manual_seed(0)
    model = masked(models.resnet14(width=8), 0.8)
    with torch.no_grad():
        model.stem[0].weight[3:6] = 0
        model.stages[1][0].body[0].weight.zero_()
        model.stages[2][0].shortcut[0].weight.zero_()
    engine = on_kernels(model, images((3, 32, 32), batch))
    assert_agrees(engine, model, images((3, 32, 32), batch))
    assert_agrees(engine, model, torch.zeros(batch, 3, 32, 32))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("batch", [1, 20])
def test_nan_and_infinity_propagate_as_in_pytorch(value, batch):
    torch.manual_seed(0)
    model = masked(models.resnet14(width=8), 0.95)
    x = images((3, 32, 32), batch)
    x[-1, 1, 5, 7] = value
    engine = on_kernels(model, x, ungrouped=3)
    with torch.no_grad():
        expected = model(x)
    assert not expected.isfinite().all()
    found = engine(x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isposinf(), expected.isposinf())
    x[-1, 1, 5, 7] = 0
    assert_agrees(engine, model, x)  # the arena holds no NaN of the call before


def test_an_overflow_that_only_zero_weights_read_gives_nan():
    """0 · ∞ is NaN in PyTorch, and the kernels skip the zero weight."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.Conv2d(2, 1, 1, bias=False)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1e30, 1.0]).reshape(2, 1, 1, 1))
        model[1].weight.copy_(torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1))
        x = torch.full((1, 1, 3, 3), 1e10)
        assert model(x).isnan().all()
        engine = on_kernels(model, x)
        assert engine(x).isnan().all()
        assert torch.equal(engine(x / 1e10), model(x / 1e10))


def test_an_empty_batch():
    model = masked(models.resnet14(width=8), 0.9)
    engine = on_kernels(model, images((3, 32, 32), 2))
    assert engine(torch.zeros(0, 3, 32, 32)).shape == (0, 10)


def test_trained_masks_from_an_artifact(tmp_path):
    torch.manual_seed(0)
    model = models.smallconv(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = probmask.attach(
        model, probmask.ProbMask(sparsity=0.9), optimizer=optimizer, total_steps=12
    )
    x, y = images((1, 8, 8), 64), torch.arange(64) % 10
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sparsifier.finalize(data=[x])
    path = tmp_path / "model.safetensors"
    metadata = {"model": "smallconv", "model_args": {"width": 16}}
    probmask.save(model, path, metadata=metadata)
    engine = probmask.runtime.compile(path, x, layers="sparse")
    for batch in BATCHES:
        assert_agrees(engine, model.eval(), images((1, 8, 8), batch))


def test_arrays_give_arrays():
    model = masked(models.smallconv(width=8), 0.9)
    x = images((1, 8, 8), 3)
    engine = on_kernels(model, x.numpy())
    found = engine(x.numpy())
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, engine(x).numpy())
