"""Convolutional networks beyond residual ones run on the kernels as a whole."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from probmask.models import MODELS
from probmask.runtime.plan.phases import phase_convolution
from reference.transposed_convolution import transposed_convolution
from runtime.comparing import assert_same
from runtime.networks import masked
from runtime.test_lowering import Net, conv
from runtime.test_transformers import nodes_in_pytorch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_on_kernels(net, *shape, batches=(1, 17)):
    """Check a network on image sizes, and that PyTorch runs none of it."""
    others = [(torch.randn(n, *shape),) for n in batches]
    engine = assert_same(masked(net, 0.5), torch.randn(2, *shape), others=others)
    assert nodes_in_pytorch(engine) == []
    return engine


class UNet(nn.Module):
    """Three levels, by transposed convolution or by interpolation."""

    def __init__(self, up, width=4):
        super().__init__()
        self.first, self.second, self.third = conv(3, width), conv(width, 8), conv(8, 16)
        self.up = nn.ModuleList([up(16, 8), up(8, width)])
        self.merge = nn.ModuleList([conv(16, 8), conv(2 * width, width)])

    def forward(self, x):
        first = self.first(x).relu()
        second = self.second(functional.max_pool2d(first, 2)).relu()
        third = self.third(functional.max_pool2d(second, 2)).relu()
        y = self.merge[0](torch.cat([second, self.up[0](third)], 1)).relu()
        return self.merge[1](torch.cat([self.up[1](y), first], 1))


def enlarge(**settings):
    return lambda a, b: nn.Sequential(nn.Upsample(scale_factor=2, **settings), conv(a, b, 1))


@pytest.mark.parametrize(
    "up",
    [
        lambda a, b: nn.ConvTranspose2d(a, b, 2, 2),
        enlarge(),
        enlarge(mode="bilinear"),
        enlarge(mode="bilinear", align_corners=True),
    ],
)
def test_a_unet(up):
    engine = assert_on_kernels(UNet(up), 3, 12, 16)
    times = {row["layer"]: row["kernels_ms"] for row in engine.describe()}
    assert [ms for layer, ms in times.items() if "cat" in layer] == [0, 0]  # nothing is copied


def test_shortcuts_of_option_a():
    model = MODELS["resnet20"].build(shortcut="pad", width=4).eval()
    assert_on_kernels(model, 3, 16, 16)


TRANSPOSED = [
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 4, "stride": 2, "padding": 1, "groups": 4},
    {"kernel_size": 3, "stride": 1, "padding": 1, "bias": False},
    {"kernel_size": 5, "stride": 3, "padding": 2, "output_padding": 2, "groups": 2},
    {
        "kernel_size": 3,
        "stride": (2, 1),
        "padding": (1, 0),
        "output_padding": (1, 0),
        "dilation": 2,
    },
    {"kernel_size": (1, 2), "stride": 3, "output_padding": 1},
]


@pytest.mark.parametrize("settings", TRANSPOSED, ids=str)
def test_transposed_convolutions(settings):
    up = nn.ConvTranspose2d(4, 8, **settings)
    net = nn.Sequential(conv(), up, nn.BatchNorm2d(8), nn.GELU(), conv(8, 4))
    engine = assert_on_kernels(net, 4, 5, 7)
    assert len(engine.network.nodes) == 3  # BatchNorm and GELU are a part of the layer


def test_a_generator():
    """From one position up, in one and in two dimensions."""
    net = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1))
    assert_on_kernels(net, 4, 1, 1)
    line = nn.Sequential(nn.ConvTranspose1d(4, 6, 3, 2, 1, 1), nn.ReLU(), nn.Conv1d(6, 2, 3))
    assert_on_kernels(line, 4, 9)


@pytest.mark.parametrize("settings", TRANSPOSED, ids=str)
def test_phases_equal_the_definition_of_a_transposed_convolution(settings):
    layer = nn.ConvTranspose2d(4, 8, **settings)
    engine = assert_same(nn.Sequential(layer), torch.randn(1, 4, 5, 6))
    (node,) = engine.network.nodes
    image = torch.randn(4, 5, 6)
    phases = phase_convolution(node)
    (top, _), (left, _) = phases.padding
    size = phases.weight.shape[2:]
    # Enough zeros around the image; a negative padding crops.
    below, right = phases.form.height + size[0], phases.form.width + size[1]
    padded = functional.pad(image[None], (left, right, top, below))
    weight, bias = torch.from_numpy(phases.weight), torch.from_numpy(phases.bias)
    found = functional.conv2d(padded, weight, bias, groups=phases.groups)[0]
    found = found[:, : phases.form.height, : phases.form.width]
    rows, columns = node.stride
    found = found.reshape(8, rows, columns, *found.shape[1:]).permute(0, 3, 1, 4, 2)
    found = found.reshape(8, found.shape[1] * rows, -1)[:, : node.form.height, : node.form.width]
    expected = transposed_convolution(image, layer)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_factor": (2, 3)},
        {"size": (7, 5)},
        {"scale_factor": 1.7},
        {"scale_factor": 2, "mode": "nearest-exact"},
        {"size": (11, 1), "mode": "bilinear", "align_corners": True},
        {"size": (3, 13), "mode": "bilinear"},
        {"scale_factor": 1.6, "mode": "bilinear"},
        {"scale_factor": 1.6, "mode": "bilinear", "recompute_scale_factor": True},
    ],
    ids=str,
)
def test_interpolation(settings):
    assert_on_kernels(nn.Sequential(conv(), nn.Upsample(**settings), conv()), 4, 5, 7)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_interpolation_of_sequences(mode):
    line = nn.Conv1d(4, 4, 3)
    assert_on_kernels(nn.Sequential(line, nn.Upsample(scale_factor=2, mode=mode), line), 4, 9)


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, x: n.conv(n.conv(x)[:, :, ::2, 1::3]),
        lambda n, x: (
            n.strided(n.conv(x)) + functional.pad(n.conv(x)[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        ),
        lambda n, x: n.conv(functional.pad(n.conv(x), (1, 2, 0, 1))),
        lambda n, x: n.conv(functional.pad(n.conv(x), (1, -2, -1, 1), value=1.5)).relu(),
        lambda n, x: n.conv(torch.cat([torch.zeros(len(x), 2, 6, 8), n.conv(x)[:, :2]], 1)),
        lambda n, x: n.narrow(torch.cat([n.conv(x)[:, :1], x.new_full((len(x), 1, 6, 8), 1.5)], 1)),
        lambda n, x: n.conv(torch.cat([n.conv(x), n.conv(x)[:, :, 1:3]], 2)),
        lambda n, x: n.conv(torch.cat([n.conv(x), n.conv(x)[..., 1:3]], 3)),
        lambda n, x: n.narrow(n.conv(x).chunk(2, 1)[1]) + n.narrow(n.conv(x)[:, :2]),
        lambda n, x: functional.max_pool2d(n.conv(x)[:, 1:3], 2),
        lambda n, x: n.conv(n.conv(x).transpose(2, 3)),
        lambda n, x: (lambda a: n.both(torch.cat([torch.cat([a, n.conv(a)], 1), a], 1)) + a)(
            n.conv(x)
        ),
        lambda n, x: (lambda a, b: torch.cat([a, b], 1) + torch.cat([b, a], 1))(
            n.conv(x), n.conv(x) + x
        ),
    ],
)
def test_slices_paddings_and_concatenations(compute):
    parts = {"conv": conv(), "strided": conv(4, 8, stride=2), "narrow": conv(2, 4)}
    assert_on_kernels(Net(compute, **parts, both=conv(12, 4)), 4, 6, 8)


class Squeeze(nn.Module):
    """A convolution and a gate for each of its channels, written in one of several ways."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.conv, self.norm, self.last = conv(3, 8), nn.BatchNorm2d(8), conv(8, 4)
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)
        self.narrow, self.widen = conv(8, 4, 1), conv(4, 8, 1)

    def gate(self, x):
        if self.form == "convolutions":
            pooled = functional.adaptive_avg_pool2d(x, 1)
            return functional.hardsigmoid(self.widen(self.narrow(pooled).relu()))
        pooled = x.mean((2, 3))
        gate = self.up(functional.silu(self.down(pooled))).sigmoid()
        return gate[:, :, None, None] if self.form == "indices" else gate.view(-1, 8, 1, 1)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        return self.last(self.gate(x) * x if self.form == "indices" else x * self.gate(x))


@pytest.mark.parametrize("form", ["convolutions", "indices", "view"])
def test_squeeze_and_excitation(form):
    assert_on_kernels(Squeeze(form), 3, 6, 8)


class Block(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, width):
        super().__init__()
        self.depthwise = conv(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def test_a_convnext():
    stem = [conv(3, 6, 4, stride=4, padding=0), LayerNorm2d(6), Block(6), Block(6)]
    stage = [LayerNorm2d(6), conv(6, 8, 2, stride=2, padding=0), Block(8), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)]
    engine = assert_on_kernels(nn.Sequential(*stem, *stage, *head), 3, 24, 32)
    # The factors of the channels and the sum are a part of the second linear layer.
    assert not any("mul" in row["layer"] or "add" in row["layer"] for row in engine.describe())


@pytest.mark.parametrize(
    "function",
    [
        nn.Sigmoid(),
        nn.Hardsigmoid(),
        nn.Tanh(),
        nn.LeakyReLU(0.2),
        nn.ELU(0.7),
        nn.SELU(),
        nn.Mish(),
        nn.PReLU(),
        nn.PReLU(4),
        nn.GroupNorm(2, 4),
        nn.GroupNorm(1, 4, affine=False),
        nn.InstanceNorm2d(4, affine=True),
        nn.Softmax(1),
    ],
    ids=str,
)
def test_functions_of_images(function):
    assert_on_kernels(nn.Sequential(conv(), function, conv()), 4, 5, 7)


@pytest.mark.parametrize("function", [nn.Sigmoid(), nn.Tanh(), nn.Softmax(-1), nn.PReLU(4)])
def test_functions_of_vectors(function):
    net = nn.Sequential(nn.Linear(6, 4), function, nn.Linear(4, 3), nn.Softmax(-1))
    assert_on_kernels(net, 6)


def test_numbers_that_are_not_finite_come_out_as_in_pytorch():
    net = nn.Sequential(conv(), nn.GroupNorm(2, 4), nn.Sigmoid(), conv(), nn.Softmax(1))
    x = torch.randn(2, 4, 5, 7)
    huge, unknown = x.clone(), x.clone()
    huge[0, 1, 2, 3] = 3e38
    unknown[1, 0, 0, 0] = float("nan")
    assert_same(masked(net, 0.3), x, others=[(huge,), (unknown,)])
