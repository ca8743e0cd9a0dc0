"""Networks drawn at random from pieces that lowering folds, fuses, runs on kernels or leaves."""

import warnings

import torch
from torch import nn
from torch.nn import functional


class RandomNetwork(nn.Module):
    """Steps that read earlier tensors; what it returns is drawn among them, too."""

    def __init__(self, seed, steps=9):
        super().__init__()
        self.draw = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.program = []  # (function, numbers of the tensors that it reads)
        self.input_shape = (self.of(2, 3, 4), self.of(4, 6, 9), self.of(4, 5, 8))
        self.shapes = [self.input_shape]
        for _ in range(steps):
            self.add_step(self.of(*STEPS))
        self.returned = sorted({self.number() for _ in range(2)} | {len(self.shapes) - 1})
        size = torch.Size(self.shapes[-1])
        self.head = nn.Linear(size.numel(), 3)
        self.line = nn.Linear(size[2], 3)
        self.draw = None  # generators cannot be copied

    def of(self, *choices):
        return choices[int(torch.randint(len(choices), (), generator=self.draw))]

    def number(self):
        """Of a tensor, the latest more often."""
        return self.of(*range(len(self.shapes)), *(len(self.shapes) - 1,) * 6)

    def add_step(self, make):
        read = self.number()
        shape = self.shapes[read]
        alike = [i for i, other in enumerate(self.shapes) if other == shape]
        step = make(self, shape)
        reads = (read, self.of(*alike))
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
    groups = net.of(1, 1, shape[0], *(g for g in (2, 3) if shape[0] % g == 0))
    outputs = groups * net.of(1, 2, 3)
    settings = {"stride": net.of(1, 1, 2, (1, 2)), "padding": net.of(0, 1, (1, 0), 2)}
    if net.of(False, False, True):
        settings = {"padding": "same"}
    mode = net.of("zeros", "zeros", "zeros", "circular", "replicate")
    layer = nn.Conv2d(
        shape[0], outputs, net.of(1, 2, 3, (1, 3)), groups=groups, dilation=net.of(1, 1, 2),
        bias=net.of(True, False), padding_mode=mode, **settings,
    )  # fmt: skip
    keep = torch.rand(layer.weight.shape) < net.of(0.0, 0.1, 0.5, 0.5, 1.0)
    layer.weight.data.mul_(keep)
    return layer


def normalization(net, shape):
    norm = nn.BatchNorm2d(shape[0], affine=net.of(True, True, False))
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def activation(net, shape):
    return net.of(
        nn.ReLU(), nn.ReLU(inplace=False), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.GELU("tanh"),
        nn.Hardswish(), nn.Hardtanh(-0.3, 0.4), nn.Hardtanh(0.1, 0.4), nn.LeakyReLU(),
        nn.Dropout(), nn.Identity(),
    )  # fmt: skip


def pooling(net, shape):
    size, stride, ceil = net.of(2, 3, (3, 2)), net.of(1, 2, 3), net.of(True, False)
    return net.of(
        nn.MaxPool2d(size, stride, 1, ceil_mode=ceil),
        nn.AvgPool2d(size, stride, 1, ceil_mode=ceil, count_include_pad=net.of(True, False)),
        nn.AvgPool2d(size, stride, divisor_override=3),
        nn.AdaptiveAvgPool2d(net.of(1, 3, (2, 4))),
        nn.AdaptiveMaxPool2d(2),
    )


def combination(net, shape):
    alpha = net.of(1, 1, 1, 2, -0.5)
    return net.of(
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
    return net.of(
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
