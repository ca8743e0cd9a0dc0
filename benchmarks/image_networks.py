"""Convolutional networks that `inference.py` measures: a U-Net and ConvNeXt-tiny.

Their weights are random. The U-Net has 64, 128, 256 and 512 channels, takes images of 256 × 256 and
goes up by transposed convolutions. ConvNeXt-tiny has the sizes of its paper: 3, 3, 9 and 3 blocks
of 96, 192, 384 and 768 channels, for images of 224 × 224.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from token_networks import TokenNetwork


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A U-Net with BatchNorm; every level of the way up reads the same level of the way down."""

    def __init__(
        self, widths: tuple[int, ...] = (64, 128, 256, 512), channels: int = 3, classes: int = 2
    ) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(_two_convolutions(a, b) for a, b in [(channels, widths[0])])
        self.down.extend(_two_convolutions(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(_two_convolutions(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each pixel."""
        skipped = []
        for i, level in enumerate(self.down):
            x = level(x if i == 0 else functional.max_pool2d(x, 2))
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.head(x)


class _LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt, by default the tiny one."""

    def __init__(
        self,
        widths: tuple[int, ...] = (96, 192, 384, 768),
        depths: tuple[int, ...] = (3, 3, 9, 3),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        before = 3
        for width, depth in zip(widths, depths, strict=True):
            if not stages:
                stages += [nn.Conv2d(before, width, 4, 4), _LayerNorm2d(width, eps=1e-6)]
            else:
                stages += [_LayerNorm2d(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
            stages += [_Block(width) for _ in range(depth)]
            before = width
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(before, eps=1e-6), nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.norm(self.stages(images).mean((2, 3))))


IMAGE_NETWORKS = {
    "unet": TokenNetwork(UNet, lambda n, g: torch.randn(n, 3, 256, 256, generator=g)),
    "convnext": TokenNetwork(ConvNeXt, lambda n, g: torch.randn(n, 3, 224, 224, generator=g)),
}
