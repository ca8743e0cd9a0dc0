"""Lowering: folding, fusing, constants, shapes, dtypes, in-place changes."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

import probmask
from probmask import InputError
from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.kernels.rows import SPLIT_STEPS
from probmask.runtime.lower.nodes import Convolution
from probmask.runtime.plan.partition import steps_of
from probmask.runtime.plan.program import build_program
from runtime.comparing import assert_close, assert_same
from runtime.networks import masked


class Net(nn.Module):
    """A module from named parts and a function that computes its output from them."""

    def __init__(self, compute, **parts):
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, *inputs):
        return self.compute(self, *inputs)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def conv(inputs=4, outputs=4, kernel=3, **settings):
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **settings})


def layers(engine):
    return [node for node in engine.network.nodes if isinstance(node, Convolution)]


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, x: n.norm(n.conv(x) + x),
        lambda n, x: n.norm(n.conv(x) + n.other(x)).relu(),
        lambda n, x: n.norm(x) + x,
        lambda n, x: (n.norm(x) + n.conv(x).relu()).relu(),
        lambda n, x: n.norm(n.norm(x)),
        lambda n, x: n.norm(n.norm(x) + x),
        lambda n, x: n.norm(n.norm(x).relu()),
        lambda n, x: n.norm(n.conv(x)) + n.conv(x),
        lambda n, x: n.norm(n.conv(n.norm(n.conv(x)).relu())),  # shared modules
    ],
)
def test_batchnorm_and_residuals(compute):
    net = Net(compute, conv=conv(), other=conv(kernel=1), norm=nn.BatchNorm2d(4))
    assert_same(masked(net, 0.3), torch.randn(2, 4, 5, 6), others=[(torch.randn(17, 4, 5, 6),)])


def test_batchnorm_is_folded_where_possible():
    net = masked(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()), 0.3)
    assert len(layers(assert_same(net, torch.randn(2, 4, 5, 6)))) == 1
    net = masked(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), 0.3)
    assert len(layers(assert_same(net, torch.randn(3, 4)))) == 1
    sequence = masked(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5)), 0.3)
    assert (
        len(layers(assert_same(sequence, torch.randn(3, 5, 4)))) == 2
    )  # it normalizes another dimension


def test_batchnorm_is_not_folded_where_the_product_overflows():
    net = nn.Sequential(conv(kernel=1, bias=False), nn.BatchNorm2d(4)).eval()
    with torch.no_grad():
        net[0].weight.mul_(1e38)
        net[1].running_var.fill_(1e-5)
    assert_same(net, 1e-10 * torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_run_in_pytorch(dtype):
    net = Net(
        lambda n, x: functional.relu(n.norm(n.conv(x))) + n.alone(x),
        conv=conv(),
        norm=nn.BatchNorm2d(4),
        alone=nn.BatchNorm2d(4),
    )
    engine = assert_same(masked(net, 0.3).to(dtype), torch.randn(2, 4, 5, 5, dtype=dtype))
    assert engine.choices.sparse == frozenset()


def test_dtypes_may_change_within_the_network():
    double = Net(lambda n, x: n.conv(n.norm(x).float()), conv=conv(), norm=nn.BatchNorm2d(4))
    double.norm.double()
    assert_same(double, torch.randn(2, 4, 5, 5, dtype=torch.float64))
    half = Net(lambda n, x: n.norm(x).float().relu(), norm=nn.BatchNorm2d(4))
    assert_same(half, torch.randn(2, 4, 5, 5).half())  # statistics in single precision
    volume = nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU())
    assert_same(volume, torch.randn(2, 2, 5, 5, 5))


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Sequential(conv(), nn.ReLU(), conv(kernel=1)), (4, 5, 6)),
        (nn.Sequential(conv(), nn.MaxPool2d(2), nn.AvgPool2d(2)), (4, 8, 8)),
        (nn.Sequential(conv(), nn.AdaptiveAvgPool2d(1), nn.Flatten(0)), (4, 4, 4)),
        (nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.MaxPool1d(2)), (4, 7)),
        (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (4,)),
        (nn.Sequential(nn.Linear(1, 6), nn.GELU()), (1,)),
    ],
)
def test_one_image_without_a_batch(net, shape):
    assert_same(net, torch.randn(shape))


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, x: n.conv(x) + n.conv(n.table),
        lambda n, x: n.conv(x) + n.norm(n.table),
        lambda n, x: n.conv(x) + functional.relu(n.table),
        lambda n, x: n.conv(x) * functional.max_pool2d(n.table, 3, 1, 1),
        lambda n, x: n.conv(x) + n.table.clone(),
        lambda n, x: torch.cat([n.conv(x), n.table.expand(x.shape[0], -1, -1, -1)], 1),
        lambda n, x: n.conv(x) + n.table.split(1)[0].flatten(1).mean(),
        lambda n, x: functional.conv2d(x, 2 * n.conv.weight),
        lambda n, x: (n.conv(x), n.table, None, 3, n.table + 1),
        lambda n, x: n.table + 1,
    ],
)
def test_layers_on_constants(compute):
    net = Net(compute, conv=conv(), norm=nn.BatchNorm2d(4), table=torch.randn(1, 4, 5, 5))
    assert_same(net, torch.randn(2, 4, 5, 5), others=[(torch.randn(3, 4, 5, 5),)])


def test_computed_weights_are_computed_once():
    net = Net(lambda n, x: functional.conv2d(x, 2 * n.weight), weight=torch.randn(3, 4, 1, 1))
    engine = assert_same(net, torch.randn(2, 4, 5, 5))
    assert [type(node) for node in engine.network.nodes] == [Convolution]


def test_random_operations_are_not_constants():
    net = Net(lambda n, x: x + torch.bernoulli(n.chances), chances=torch.full((64,), 0.5))
    engine = probmask.runtime.compile(net, torch.zeros(2, 64))
    assert not torch.equal(engine(torch.zeros(2, 64)), engine(torch.zeros(2, 64)))


def test_constants_that_are_returned_are_copies():
    net = Net(lambda n, x: (n.conv(x), n.table), conv=conv(), table=torch.ones(3))
    engine = probmask.runtime.compile(net, torch.randn(2, 4, 5, 5))
    engine(torch.randn(2, 4, 5, 5))[1].zero_()
    assert torch.equal(engine(torch.randn(2, 4, 5, 5))[1], torch.ones(3))


def test_one_output_is_not_changed_through_another():
    net = Net(lambda n, x: (lambda y: (y, y.clone()))(n.conv(x)), conv=conv())
    engine = probmask.runtime.compile(net, torch.randn(2, 4, 5, 5), layers="sparse")
    first, second = engine(torch.randn(2, 4, 5, 5))
    assert_close(second, first.clone())
    first.zero_()
    assert second.abs().max() > 0


def test_a_forward_that_changes_a_buffer_raises():
    def count(n, x):
        n.calls += 1
        return n.linear(x) + n.calls

    counting = Net(count, linear=nn.Linear(4, 4), calls=torch.zeros(1))
    with pytest.raises(InputError, match=r"forward changes 'calls'.*keeps nothing between calls"):
        probmask.runtime.compile(counting, torch.randn(2, 4))


def test_a_module_in_training_is_compiled_for_evaluation():
    net = masked(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.Dropout()), 0.3)
    x = torch.randn(2, 4, 5, 5)
    expected = net(x).detach()
    engine = probmask.runtime.compile(net.train(), x)
    assert net.training
    assert_close(engine(x), expected)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.ReLU(inplace=True), conv()),
        Net(lambda n, x: n.conv(x.mul_(2)), conv=conv()),
    ],
)
def test_inputs_are_changed_as_in_pytorch(net):
    x = torch.randn(2, 4, 5, 5)
    engine = assert_same(net, x)
    mine, theirs, array = x.clone(), x.clone(), x.numpy().copy()
    net(theirs)
    engine(mine)
    engine(array)
    assert torch.equal(mine, theirs)
    assert torch.equal(torch.from_numpy(array), theirs)


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, x: (lambda y: functional.relu_(y) + y)(n.conv(x)),
        lambda n, x: (lambda y: y.add_(x) + y)(n.conv(x)),
        lambda n, x: (lambda y: (y[:, 0].zero_(), y.relu()))(n.conv(x))[1],
        lambda n, x: (lambda y: y + y)(n.conv(x)),
        lambda n, x: (lambda y: y * y)(n.conv(x)),
        lambda n, x: (lambda y: torch.cat([y, y, y], 1))(n.conv(x)),
        lambda n, x: (lambda y: {"y": [y, (y.relu(), n.conv(y))]})(n.conv(x)),
        lambda n, x: (n.conv(x), x, x.view(x.shape[0], -1)),
        lambda n, x: torch.add(n.conv(x), x, alpha=2.5),
        lambda n, x: n.conv(x) + n.conv(x)[:1],
        lambda n, x: n.conv(x) * n.conv(x).mean((2, 3), keepdim=True),
        lambda n, x: (n.conv(x) + 1.5) * (n.conv(x) > 0) - n.conv(x).double(),
        lambda n, x: torch.cat([n.conv(x), x], 2),
        lambda n, x: torch.cat([n.conv(x), n.conv(x)], -1),
        lambda n, x: n.line(n.conv(x)),
        lambda n, x: n.line(n.conv(x).transpose(1, 3)).relu(),
        lambda n, x: n.conv(n.conv(x).flatten(1).view(-1, 4, 4, 4)),
        lambda n, x: n.conv(x).flatten(0, 1),
    ],
)
def test_tensors_with_several_uses_and_shapes(compute):
    """All sizes are four, so that mixed-up dimensions are not noticed by their size."""
    net = Net(compute, conv=conv(), line=nn.Linear(4, 4))
    others = [(torch.randn(batch, 4, 4, 4),) for batch in (1, 5)]
    # A float64 output that was computed from float32 has the tolerance of float32.
    assert_same(net, torch.randn(4, 4, 4, 4), others=others, tolerance=2e-5)


@pytest.mark.parametrize(
    "layer",
    [
        conv(kernel=2, padding="same", dilation=3),
        conv(kernel=3, padding=2, padding_mode="circular"),
        conv(kernel=3, padding=2, padding_mode="reflect"),
        conv(4, 12, groups=4, dilation=2, stride=(2, 1)),
        conv(kernel=3, padding=7, stride=3),
        conv(kernel=3, stride=11),
        nn.ConvTranspose2d(4, 6, 3, stride=2),
        Net(lambda n, x: n.conv(functional.pad(x, (-1, 2, 0, -2))), conv=conv()),
    ],
)
def test_convolutions_of_every_kind(layer):
    assert_same(nn.Sequential(conv(), nn.ReLU(), layer), torch.randn(3, 4, 8, 9))


def table_of(engine):
    """Return the operations of a network that runs on the kernels as a whole."""
    (whole,) = steps_of(engine.network, {node.name for node in engine.network.nodes})
    return build_program(whole, threads=1).table


def test_tensors_that_do_not_fit_into_the_cache():
    """Inputs are fetched ahead, in several parts per tile; outputs are in the order of planes."""
    layers = nn.Conv2d(3, 300, 3, padding=1), nn.ReLU(), nn.Conv2d(300, 70, 1)
    for layer in (layers[0], layers[2]):
        layer.weight.data *= torch.rand_like(layer.weight) < 0.08
    net, example = nn.Sequential(*layers), torch.randn(1, 3, 40, 48)
    engine = assert_same(net, example)
    first, second = (op for op in table_of(engine) if op[Field.KIND] == Kind.CONVOLVE)
    assert (first[Field.FETCHED], second[Field.FETCHED]) == (0, 300)
    assert min(second[Field.TILES], second[Field.BLOCKS]) > 1
    two = probmask.runtime.compile(net, example, layers="sparse", threads=2)
    assert_close(two(example), net(example))


@pytest.mark.parametrize(("step", "columns"), list(product(SPLIT_STEPS, (1, 3, 5, 11, 16, 37))))
def test_rows_are_split_into_all_phases_at_once(step, columns):
    """A network of patches, of which some elements are not read, on one thread and on two."""
    patches = nn.Conv2d(2, 5, step, stride=step)
    patches.weight.data *= torch.rand_like(patches.weight) < 0.3
    example = torch.randn(2, 2, 3 * step, columns * step)
    engine = assert_same(nn.Sequential(patches), example)
    table = table_of(engine)
    (split,) = (op for op in table if op[Field.KIND] == Kind.SPLIT_PHASES)
    assert split[Field.TOGETHER] == step
    one_image = example[:1]  # whose layers both threads compute
    two = probmask.runtime.compile(nn.Sequential(patches), one_image, layers="sparse", threads=2)
    assert_close(two(one_image), patches(one_image))


def test_inputs_may_have_any_strides():
    net = Net(lambda n, x: x.flatten(1) + n.conv(x).flatten(1), conv=conv())
    x = torch.randn(2, 4, 6, 5)
    others = [
        (x.to(memory_format=torch.channels_last),),
        (torch.randn(2, 5, 6, 4).permute(0, 3, 2, 1),),
        (torch.randn(4, 4, 6, 5)[::2],),
    ]
    assert_same(net, x, others=others)
    last = x.to(memory_format=torch.channels_last)
    assert_same(Net(lambda n, x: n.conv(x).permute(0, 2, 3, 1).flatten(1), conv=conv()), last)


def test_several_inputs():
    both = Net(lambda n, x, y: n.conv(x) + n.conv(y), conv=conv())
    pair = torch.randn(2, 4, 5, 5), torch.randn(2, 4, 5, 5)
    engine = assert_same(both, *pair, others=[(torch.randn(7, 4, 5, 5), torch.randn(7, 4, 5, 5))])
    with pytest.raises(InputError, match="not 5×4×5×5"):
        engine(torch.randn(7, 4, 5, 5), torch.randn(5, 4, 5, 5))
    once = Net(lambda n, x, mask: n.line(x) * mask, line=nn.Linear(4, 4))
    others = [(torch.randn(5, 6, 4), torch.randn(1, 6, 4))]
    assert_same(once, torch.randn(3, 6, 4), torch.randn(1, 6, 4), others=others)
    shifted = Net(lambda n, x, y: n.line(x) + n.line(y)[1:], line=nn.Linear(4, 4))
    engine = assert_same(shifted, torch.randn(3, 4), torch.randn(4, 4))
    with pytest.raises((InputError, RuntimeError)):
        engine(torch.randn(6, 4), torch.randn(5, 4))


def test_any_number_of_inputs():
    net = Net(lambda n, *inputs: [n.line(x) for x in inputs], line=nn.Linear(4, 4))
    assert_same(net, torch.randn(2, 4), torch.randn(2, 4), others=[(torch.randn(9, 4),) * 2])


def test_len_of_an_input_does_not_fix_the_batch_size():
    net = Net(lambda n, x: n.conv(x).reshape(len(x), -1) * float(len(x)), conv=conv())
    assert_same(net, torch.randn(4, 4, 4, 4), others=[(torch.randn(1, 4, 4, 4),)])


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = conv()

    def forward(self, x):
        with torch.no_grad():
            y = self.conv(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.conv(y)
        return torch.cond(z.sum() > 0, lambda z: z.float().relu(), lambda z: z.float() - 1, (z,))


def test_nested_graphs():
    assert_same(Blocks(), torch.randn(2, 4, 5, 5), tolerance=0.02)


class LiveTensors(TorchDispatchMode):
    """Counts the live results of operations."""

    def __init__(self):
        super().__init__()
        self.tensors, self.most = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.tensors[result] = None
            self.most = max(self.most, len(self.tensors))
        return result


def test_tensors_are_freed_after_their_last_use():
    def chain(n, x):
        for dim in (1, 2, 3) * 4:
            x = torch.cumsum(x, dim)
        return n.conv(x)

    x = torch.randn(2, 4, 5, 5)
    engine = probmask.runtime.compile(Net(chain, conv=conv()), x, layers="sparse")
    with LiveTensors() as live:
        engine(x)
    assert live.most <= 4
