"""Convolutions, pooling and normalization in three dimensions."""

import pytest
import torch
from torch import nn

from reference.volume_convolution import volume_convolution
from runtime.comparing import assert_close, assert_same
from runtime.networks import masked

SETTINGS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": (1, 3, 3), "stride": (2, 1, 1)},
    {"kernel_size": (3, 1, 1), "padding": (3, 0, 0)},  # some slices see only padding
    {"kernel_size": (2, 3, 2), "dilation": (2, 1, 2), "padding": (1, 2, 1), "groups": 2},
    {"kernel_size": (3, 2, 4), "stride": (1, 3, 2), "dilation": (1, 2, 1), "groups": 4},
    {"kernel_size": (3, 7, 8), "padding": (1, 0, 0)},  # one position per slice
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def on_kernels(engine):
    """Return whether all nodes run on the kernels."""
    return all(node.form is not None for node in engine.network.nodes)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_convolutions_agree_with_the_definition_and_pytorch(settings):
    layer = masked(nn.Sequential(nn.Conv3d(4, 8, **settings), nn.ReLU()), 0.6)
    volumes = torch.randn(2, 4, 5, 7, 8)
    engine = assert_same(layer, volumes, others=[(torch.randn(19, 4, 5, 7, 8),)])
    assert on_kernels(engine)
    assert len(engine.network.nodes) == 1
    expected = torch.from_numpy(volume_convolution(volumes[0].numpy(), layer[0])).relu()
    assert_close(engine(volumes)[0], expected.float())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    layer = nn.Conv3d(2, 3, (2, 3, 4), padding=padding)
    assert on_kernels(assert_same(masked(layer, 0.3), torch.randn(2, 2, 4, 5, 6)))


class Volumes(nn.Module):
    """A residual network on volumes, with every kind of layer that has a kernel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.GELU())
        self.first = nn.Conv3d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(8)
        self.grouped = nn.Sequential(
            nn.Conv3d(8, 8, 1), nn.GroupNorm(2, 8), nn.PReLU(8), nn.InstanceNorm3d(8, affine=True)
        )
        self.alone = nn.BatchNorm3d(16)
        self.last = nn.Conv3d(16, 12, (3, 3, 1), stride=(2, 1, 1), padding=(1, 1, 0))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        x = (self.norm(self.first(x)) + x).relu()
        x = nn.functional.max_pool3d(x, 3, 2, 1)
        x = self.alone(torch.cat([x, 0.5 * self.grouped(x)], 1))
        x = nn.functional.avg_pool3d(x, 2, 1, 1, count_include_pad=False)
        x = self.last(x).sigmoid()
        pooled = nn.functional.adaptive_avg_pool3d(x, (2, 1, 3))
        return self.head(x.mean((2, 3, 4))), pooled


def test_a_network_on_volumes():
    given = [(torch.randn(batch, 2, 6, 9, 8),) for batch in (3, 17)]
    engine = assert_same(masked(Volumes(), 0.5), *given[0], others=given[1:])
    assert on_kernels(engine)


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, x: n.conv(n.conv(x)[:, :, ::2]),
        lambda n, x: n.conv(nn.functional.pad(n.conv(x), (1, 0, 2, 1, 1, 1))),
        lambda n, x: n.conv(torch.cat([n.conv(x), x.relu()], 2)),
        lambda n, x: n.conv(n.conv(x).permute(0, 1, 3, 2, 4)).flatten(1),
        lambda n, x: n.part(n.conv(x).chunk(2, 1)[1]),
        lambda n, x: n.conv(n.conv(x) * x.mean((2, 3, 4), keepdim=True)),
        lambda n, x: n.conv(x).flatten(2).softmax(1).transpose(1, 2),
        lambda n, x: n.image(n.conv(x).mean(2)) + n.image(n.conv(x)[:, :, 1]),
        lambda n, x: n.up(n.conv(x)) + 1,
    ],
)
def test_volumes_that_are_sliced_joined_and_reshaped(compute):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(4, 4, 3, padding=1)
            self.part = nn.Conv3d(2, 4, 3, padding=1)
            self.image = nn.Conv2d(4, 4, 3, padding=1)
            self.up = nn.ConvTranspose3d(4, 2, 2, stride=2)

        def forward(self, x):
            return compute(self, x)

    assert_same(masked(Net(), 0.4), torch.randn(2, 4, 4, 5, 6))


def test_what_has_no_kernel_is_named(capsys):
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2))
    engine = assert_same(masked(net, 0.5), torch.randn(1, 1, 4, 4, 4))
    engine.explain()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "conv_transpose3d" in line]
    assert "PyTorch" in line
    assert line.endswith("no kernel")
