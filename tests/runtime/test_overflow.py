"""Large numbers and weights that are not finite: results overflow where PyTorch's do."""

import pytest
import torch
from torch import nn

from runtime.comparing import assert_close, assert_same

LARGE = 3e38
POOLS = [
    nn.AvgPool2d(2),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    nn.AvgPool2d((3, 2), (2, 3), (1, 0), divisor_override=5),
    nn.AvgPool2d(2, 3, 1, ceil_mode=True),
    nn.AdaptiveAvgPool2d((3, 2)),
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d(9),
]


def identity():
    """An identity layer, so that the pooling reads the output of a kernel."""
    layer = nn.Conv2d(2, 2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2).reshape(2, 2, 1, 1))
        layer.bias.zero_()
    return layer


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_averages_overflow_as_in_pytorch(pool):
    generator = torch.Generator().manual_seed(0)
    usual = torch.randn(20, 2, 7, 6, generator=generator)
    signs = torch.randn(20, 2, 7, 6, generator=generator).sign()
    only = torch.zeros(20, 2, 7, 6)
    only[:, :, 3, 3] = LARGE
    rows = LARGE * torch.ones(20, 2, 7, 6)
    rows[:, :, 1::2] = -LARGE
    columns = LARGE * torch.ones(20, 2, 7, 6)
    columns[:, :, :, 1::2] = -LARGE
    others = [(x,) for x in (only, LARGE * torch.ones(20, 2, 7, 6), columns, usual * 1e30)]
    net = nn.Sequential(identity(), pool).eval()
    engine = assert_same(net, usual, others=others)
    # A sum of both signs may overflow in PyTorch's order of summation and not in another.
    with torch.no_grad():
        for x in (rows, LARGE * signs):
            expected, found = net(x), engine(x)
            finite = expected.isfinite()
            assert found[finite].isfinite().all()
            assert_close(found[finite], expected[finite])


@pytest.mark.parametrize("curve", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.Hardswish()], ids=str)
def test_curves_of_large_numbers(curve):
    x = torch.tensor([-LARGE, -1e30, -1e10, -200.0, -90.0, -87.5, 1.0]).reshape(1, 1, 1, -1)
    net = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), curve).eval()
    with torch.no_grad():
        net[0].weight.fill_(1.0)
    assert_same(net, x, others=[(1e-30 * x,)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite(value):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()).eval()
    with torch.no_grad():
        net[0].weight.mul_(torch.rand(net[0].weight.shape) < 0.3)
        net[0].weight[1, 0, 1, 1] = value
    x = torch.randn(2, 2, 5, 6)
    x[0, 0, 2, 2] = 0
    assert_same(net, x, others=[(torch.zeros(1, 2, 5, 6),)])


@pytest.mark.parametrize(
    ("weight", "gamma", "mean", "variance"),
    [
        (LARGE, 1e-38, 0, 1),  # the convolution overflows, the product does not
        (LARGE, 1e-3, 0, 1),
        (LARGE, 0, 0, 1),  # 0 · ∞
        (1, 1e-10, LARGE, 1e20),
        (1e-38, 1, 0, LARGE),  # the product underflows
        (1, LARGE, 0, 1e-5),  # the scale overflows, and 0 times it is NaN
        (1, 1e30, 1e10, 1),  # the shift overflows
        (1, 1, 0, -1),
    ],
)
def test_batch_norm_of_extreme_numbers(weight, gamma, mean, variance):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3)).eval()
    with torch.no_grad():
        net[0].weight.mul_(torch.rand(net[0].weight.shape) < 0.5).mul_(weight)
        for tensor, value in (
            (net[1].weight, gamma),
            (net[1].running_mean, mean),
            (net[1].running_var, variance),
        ):
            tensor.fill_(value)
    x = torch.randn(2, 2, 5, 6)
    assert_same(net, x, others=[(1e-3 * x,), (1e-30 * x,), (1e3 * x,), (1e37 * x,)])
