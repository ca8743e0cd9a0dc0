"""Random networks of operations that are folded, fused, run on kernels or left to PyTorch."""

import warnings

import torch
from torch import nn
from torch.nn import functional


class RandomNetwork(nn.Module):
    """A random sequence of operations on earlier tensors. Some of the tensors are returned."""

    def __init__(self, seed, steps=9):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.program = []  # (function, indices of the tensors that it reads)
        self.input_shape = (
            self.draw_from(2, 3, 4),
            self.draw_from(4, 6, 9),
            self.draw_from(4, 5, 8),
        )
        self.shapes = [self.input_shape]
        for _ in range(steps):
            self.add_step(self.draw_from(*STEPS))
        self.returned = sorted({self.draw_index() for _ in range(2)} | {len(self.shapes) - 1})
        size = torch.Size(self.shapes[-1])
        self.head = nn.Linear(size.numel(), 3)
        self.line = nn.Linear(size[2], 3)
        self.generator = None  # generators cannot be deep-copied

    def draw_from(self, *choices):
        return choices[int(torch.randint(len(choices), (), generator=self.generator))]

    def draw_index(self):
        """Draw the index of a tensor, most often the latest."""
        return self.draw_from(*range(len(self.shapes)), *(len(self.shapes) - 1,) * 6)

    def add_step(self, make):
        read = self.draw_index()
        shape = self.shapes[read]
        alike = [i for i, other in enumerate(self.shapes) if other == shape]
        step = make(self, shape)
        reads = (read, self.draw_from(*alike))
        if isinstance(step, nn.Module):
            self.parts.append(step)
            part = step
            step = lambda x, _: part(x)  # noqa: E731
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = step(*(torch.ones(2, *self.shapes[i]) for i in reads))
        except RuntimeError:  # a window larger than the image
            return
        if result.dim() == 4 and 0 < result.numel() < 4000:
            self.program.append((step, reads))
            self.shapes.append(tuple(result.shape[1:]))

    def forward(self, x):
        tensors = [x]
        for step, reads in self.program:
            tensors.append(step(*(tensors[i] for i in reads)))
        last = tensors[-1]
        return {
            "some": [tensors[i] for i in self.returned],
            "head": self.head(last.flatten(1)),
            "line": (self.line(last).relu(), x.shape[0]),
        }


def convolution(net, shape):
    groups = net.draw_from(1, 1, shape[0], *(g for g in (2, 3) if shape[0] % g == 0))
    outputs = groups * net.draw_from(1, 2, 3)
    settings = {"stride": net.draw_from(1, 1, 2, (1, 2)), "padding": net.draw_from(0, 1, (1, 0), 2)}
    if net.draw_from(False, False, True):
        settings = {"padding": "same"}
    mode = net.draw_from("zeros", "zeros", "zeros", "circular", "replicate")
    layer = nn.Conv2d(
        shape[0], outputs, net.draw_from(1, 2, 3, (1, 3)), groups=groups,
        dilation=net.draw_from(1, 1, 2), bias=net.draw_from(True, False),
        padding_mode=mode, **settings,
    )  # fmt: skip
    keep = torch.rand(layer.weight.shape) < net.draw_from(0.0, 0.1, 0.5, 0.5, 1.0)
    layer.weight.data.mul_(keep)
    return layer


def normalization(net, shape):
    norm = nn.BatchNorm2d(shape[0], affine=net.draw_from(True, True, False))
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def activation(net, shape):
    return net.draw_from(
        nn.ReLU(), nn.ReLU(inplace=False), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"),
        nn.Hardswish(), nn.Hardtanh(-0.3, 0.4), nn.Hardtanh(0.1, 0.4), nn.LeakyReLU(),
        nn.Dropout(), nn.Identity(),
    )  # fmt: skip


def pooling(net, shape):
    size, stride, ceil = (
        net.draw_from(2, 3, (3, 2)),
        net.draw_from(1, 2, 3),
        net.draw_from(True, False),
    )
    return net.draw_from(
        nn.MaxPool2d(size, stride, 1, ceil_mode=ceil),
        nn.AvgPool2d(size, stride, 1, ceil_mode=ceil, count_include_pad=net.draw_from(True, False)),
        nn.AvgPool2d(size, stride, divisor_override=3),
        nn.AdaptiveAvgPool2d(net.draw_from(1, 3, (2, 4))),
        nn.AdaptiveMaxPool2d(2),
    )


def combination(net, shape):
    alpha = net.draw_from(1, 1, 1, 2, -0.5)
    return net.draw_from(
        lambda x, y: x + y,
        lambda x, y: x + y,
        lambda x, y: x * y,
        lambda x, y: torch.add(x, y, alpha=alpha),
        lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.cat([x, y, x], 2),
        lambda x, y: (x + y).relu() - y,
        lambda x, y: x + y.mean((2, 3), keepdim=True),
        lambda x, y: functional.relu_(x + 0.5) * y,
    )


def rearrangement(net, shape):
    table = torch.randn(1, *shape)
    return net.draw_from(
        lambda x, _: x * 0.5 + 1,
        lambda x, _: x + table.relu(),
        lambda x, _: x.transpose(2, 3),
        lambda x, _: x.flatten(1).view(-1, *shape),
        lambda x, _: functional.pad(x, (1, -1, 0, 1)),
        lambda x, _: x.clone().clamp_(-0.5, 1),
        lambda x, _: torch.cumsum(x, 3) * 0.2,
        lambda x, _: functional.interpolate(x, scale_factor=2),
    )


STEPS = (convolution,) * 4 + (normalization,) * 2 + (activation,) * 3 + (combination,) * 3
STEPS += (pooling, rearrangement)
