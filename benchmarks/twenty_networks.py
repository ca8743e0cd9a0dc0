"""Twenty small networks of every kind, for `never_slower.py`. Their weights are random."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from image_networks import ConvNeXt, UNet
from probmask.models.convnet import mobilenetv1, vgg19
from probmask.models.mlp import lenet300
from probmask.models.resnet import resnet20
from token_networks import TokenNetwork


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        sizes = [(inputs, width, 1), (width, width, 3), (width, 4 * width, 1)]
        self.layers = nn.Sequential()
        for i, (a, b, kernel) in enumerate(sizes):
            self.layers.append(nn.Conv2d(a, b, kernel, padding=kernel // 2, bias=False))
            self.layers.append(nn.BatchNorm2d(b))
            self.layers.append(nn.ReLU() if i < 2 else nn.Identity())
        self.shortcut = nn.Conv2d(inputs, 4 * width, 1) if inputs != 4 * width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.layers(x) + self.shortcut(x))


class _Excitation(nn.Module):
    """A convolution whose channels are scaled by squeeze and excitation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.down, self.up = nn.Linear(outputs, outputs // 4), nn.Linear(outputs // 4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.norm(self.conv(x)))
        scale = torch.sigmoid(self.up(functional.relu(self.down(y.mean((2, 3))))))
        return y * scale[:, :, None, None]


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part.reshape(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.mix(self.norm1(x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class _Decoder(nn.Module):
    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, words: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(_DecoderBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class _Recurrent(nn.Module):
    """A recurrent layer and a classifier of its last output."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(layer.hidden_size, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class _Vision(nn.Module):
    """A small ViT with `nn.TransformerEncoder`, which PyTorch runs by a fused kernel."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens + self.positions).mean(1))


class _Fourier(nn.Module):
    """Linear layers between Fourier transforms, which have no kernel."""

    def __init__(self, width: int = 128, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(torch.fft.fft2(x).real)
        return x


class _Ranking(nn.Module):
    """Linear layers between operations without a kernel: sort, cumsum, where."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sort(self.first(x), -1).values
        y = torch.cumsum(self.second(torch.where(y > 0, y, 0.1 * y)), -1)
        return self.head(y - y.amax(-1, keepdim=True))


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _tiny_convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def _bottlenecks() -> nn.Module:
    blocks = [_Bottleneck(16, 16), _Bottleneck(64, 16), nn.MaxPool2d(2), _Bottleneck(64, 32)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *ends)


def _excitations() -> nn.Module:
    blocks = [_Excitation(3, 32), nn.MaxPool2d(2), _Excitation(32, 64), _Excitation(64, 64)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def _feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


def _noise(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda batch, generator: torch.randn(batch, *shape, generator=generator)


def _words(batch: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 512, (batch, 64), generator=generator)


def _convnext() -> nn.Module:
    return ConvNeXt((24, 48, 96, 192), (1, 1, 3, 1), classes=10)


TWENTY_NETWORKS = {
    "one linear layer": TokenNetwork(lambda: nn.Linear(64, 10), _noise(64)),
    "tiny MLP": TokenNetwork(lambda: _mlp(16, 32, 4), _noise(16)),
    "lenet300": TokenNetwork(lenet300, _noise(1, 28, 28)),
    "wide MLP": TokenNetwork(lambda: _mlp(512, 1024, 1024, 10), _noise(512)),
    "FFN, GELU": TokenNetwork(_feed_forward, _noise(64, 256)),
    "tiny CNN": TokenNetwork(_tiny_convolutions, _noise(1, 8, 8)),
    "vgg19": TokenNetwork(lambda: vgg19(width=16), _noise(3, 32, 32)),
    "resnet20": TokenNetwork(resnet20, _noise(3, 32, 32)),
    "bottlenecks": TokenNetwork(_bottlenecks, _noise(3, 32, 32)),
    "mobilenetv1": TokenNetwork(lambda: mobilenetv1(classes=10, width=8), _noise(3, 64, 64)),
    "U-Net": TokenNetwork(lambda: UNet((16, 32, 64)), _noise(3, 64, 64)),
    "ConvNeXt": TokenNetwork(_convnext, _noise(3, 64, 64)),
    "SE blocks": TokenNetwork(_excitations, _noise(3, 32, 32)),
    "ViT": TokenNetwork(_Vision, _noise(3, 32, 32)),
    "encoder": TokenNetwork(_encoder, _noise(64, 128)),
    "decoder": TokenNetwork(_Decoder, _words),
    "LSTM": TokenNetwork(lambda: _Recurrent(nn.LSTM(64, 128, 2, batch_first=True)), _noise(32, 64)),
    "GRU": TokenNetwork(lambda: _Recurrent(nn.GRU(64, 128, batch_first=True)), _noise(32, 64)),
    "Fourier mixer": TokenNetwork(_Fourier, _noise(64, 128)),
    "sort and cumsum": TokenNetwork(_Ranking, _noise(64)),
}
