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
        nn.Dropout(), nn.Identity(), nn.Sigmoid(), nn.Tanh(), nn.ELU(), nn.PReLU(shape[0]),
        nn.Softmax(1), nn.GroupNorm(1, shape[0]), nn.Hardsigmoid(),
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
        lambda x, y: x * y.mean((2, 3), keepdim=True).sigmoid(),
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
        lambda x, _: functional.pad(x, (1, 0, 2, 1)),
        lambda x, _: functional.pad(x[:, :, ::2, 1::2], (0, 0, 0, 0, 1, 2)),
        lambda x, _: torch.cat([x[:, :1], x.flip(1)[:, 1:], x[:, :1]], 1),
        lambda x, _: x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2),
        lambda x, _: x[:, :, 1:],
    )


def enlargement(net, shape):
    groups = net.draw_from(1, 1, shape[0])
    stride = net.draw_from(1, 2, 3, (1, 2))
    layer = nn.ConvTranspose2d(
        shape[0], groups * net.draw_from(1, 2), net.draw_from(1, 2, 3, (4, 3)), stride,
        padding=net.draw_from(0, 0, 1), groups=groups, dilation=net.draw_from(1, 1, 2),
        bias=net.draw_from(True, False),
    )  # fmt: skip
    layer.weight.data.mul_(torch.rand(layer.weight.shape) < 0.5)
    size, aligned = net.draw_from((5, 9), (3, 3), (11, 4)), net.draw_from(True, False)
    return net.draw_from(
        layer,
        layer,
        lambda x, _: functional.interpolate(x, scale_factor=(2, 1)),
        lambda x, _: functional.interpolate(x, size=size),
        lambda x, _: functional.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
        lambda x, _: functional.interpolate(x, size=size, mode="bilinear", align_corners=aligned),
        lambda x, _: functional.interpolate(x, scale_factor=1.7, mode="bilinear"),
    )


STEPS = (convolution,) * 4 + (normalization,) * 2 + (activation,) * 3 + (combination,) * 3
STEPS += (pooling, rearrangement, rearrangement, enlargement, enlargement)


class RandomTokens(nn.Module):
    """A random sequence of operations on tokens: batch × tokens × features."""

    def __init__(self, seed, steps=10):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self.parts = nn.ModuleList()
        self.program = []
        self.input_shape = (self.draw_from(3, 17, 24), self.draw_from(8, 12))
        self.shapes = [self.input_shape]
        for _ in range(steps):
            self.add_step(self.draw_from(*TOKEN_STEPS))
        self.head = nn.Linear(self.shapes[-1][-1], 3)
        self.generator = None

    draw_from, draw_index = RandomNetwork.draw_from, RandomNetwork.draw_index

    def add_step(self, make):
        read = self.draw_index()
        step = make(self, *self.shapes[read])
        if isinstance(step, nn.Module):
            self.parts.append(step)
            if isinstance(step, nn.Linear):
                step.weight.data.mul_(torch.rand(step.weight.shape) < self.draw_from(0.1, 0.5))
        alike = [i for i, other in enumerate(self.shapes) if other == self.shapes[read]]
        reads = (read, self.draw_from(*alike))
        with torch.no_grad():
            result = _apply(step, *(torch.ones(2, *self.shapes[i]) for i in reads))
        if result.shape[1] < 60 and result.shape[2] < 60:
            self.program.append((step, reads))
            self.shapes.append(tuple(result.shape[1:]))

    def forward(self, x):
        tensors = [x]
        for step, reads in self.program:
            tensors.append(_apply(step, *(tensors[i] for i in reads)))
        last = tensors[-1]
        return last, self.head(last.mean(1)), self.head(last[:, 0]), tensors[len(tensors) // 2]


def _apply(step, x, y):
    return step(x) if isinstance(step, nn.Module) else step(x, y)


class WrittenOut(nn.Module):
    """Attention with heads, in one of several ways to write it."""

    def __init__(self, features, heads, form):
        super().__init__()
        self.heads, self.form = heads, form
        self.qkv = nn.Linear(features, 3 * features)
        self.table = nn.Parameter(torch.randn(1, heads, 1, features // heads))

    def forward(self, x):
        batch, tokens, features = x.shape
        size = features // self.heads
        mixed = self.qkv(x).reshape(batch, tokens, 3, self.heads, size)
        q, k, v = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        attention = functional.scaled_dot_product_attention
        if self.form == "products":
            y = ((q @ k.transpose(-2, -1)) * size**-0.5).softmax(-1) @ v
        elif self.form == "causal":
            y = attention(q, k, v, is_causal=True)
        elif self.form == "grouped":
            y = attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        elif self.form == "masked":
            visible = (x.mean(-1) > -0.3)[:, None, None, :] | torch.eye(tokens).bool()
            y = attention(q, k, v, visible)
        elif self.form == "rotated":
            half = torch.cat([-k[..., size // 2 :], k[..., : size // 2]], -1)
            y = attention(q * self.table, k + half * self.table, v, scale=0.4)
        else:
            y = attention(q, k[:, :, 1:], v[:, :, 1:])
        return y.transpose(1, 2).reshape(batch, tokens, features)


def encoder(net, tokens, features):
    return nn.TransformerEncoderLayer(
        features, 2, 20, batch_first=True, norm_first=net.draw_from(True, False),
        activation=net.draw_from("relu", "gelu"),
    )  # fmt: skip


def attention(net, tokens, features):
    forms = ("products", "causal", "grouped", "masked", "rotated", "shifted")
    return WrittenOut(features, 2, net.draw_from(*forms))


def token_layer(net, tokens, features):
    return nn.Linear(features, net.draw_from(features, 8, 12), bias=net.draw_from(True, False))


def token_norm(net, tokens, features):
    scale = torch.rand(features)
    return net.draw_from(
        nn.LayerNorm(features),
        nn.RMSNorm(features),
        lambda x, _: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale,
        nn.LayerNorm(features, elementwise_affine=False),
    )


def token_function(net, tokens, features):
    table = torch.randn(1, tokens, features)
    return net.draw_from(
        lambda x, y: x + y,
        lambda x, y: x * y * 0.5,
        lambda x, y: functional.silu(x) * y,
        lambda x, _: functional.gelu(x) + table,
        lambda x, _: functional.gelu(x, approximate="tanh") / 3,
        lambda x, _: 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x.pow(3)))),
        lambda x, _: (table * x).relu(),
        lambda x, _: x + x.mean(1, keepdim=True),
        lambda x, _: x.softmax(-1),
    )


def token_move(net, tokens, features):
    first = torch.randn(1, 1, features)
    return net.draw_from(
        lambda x, _: torch.cat([first.expand(x.shape[0], -1, -1), x], 1),
        lambda x, y: torch.cat([x, y[..., :4]], 2),
        lambda x, _: x[:, 1:] + x[:, :-1],
        lambda x, _: functional.pad(x, (0, 0, 1, 0)),
        lambda x, _: torch.stack(x.chunk(2, -1), 1).flatten(1, 2),
        lambda x, _: x.transpose(0, 1).contiguous().transpose(1, 0).flip(1),
        lambda x, _: x.reshape(-1, features).relu().view(-1, tokens, features),
        lambda x, _: functional.gelu(x.transpose(1, 2)).transpose(1, 2) + x,
    )


TOKEN_STEPS = (token_layer,) * 3 + (token_norm,) * 2 + (token_function,) * 3
TOKEN_STEPS += (token_move,) * 3 + (attention,) * 2 + (encoder,)
