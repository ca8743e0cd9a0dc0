"""A small vision transformer that classifies images."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.models.blocks import (
    check_arguments,
    check_heads,
    check_image_size,
    parse_image_size,
)
from probmask.models.encoder_block import EncoderBlock

_DEVIATION = 0.02  # of the initial positions


class VisionTransformer(nn.Module):
    """A linear layer for each patch, positions, encoder blocks, and a classifier of their mean."""

    def __init__(
        self,
        patches: nn.Conv2d,
        blocks: Sequence[EncoderBlock],
        classifier: nn.Linear,
        *,
        image_size: tuple[int, int],
        dropout: float,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        width, side = patches.out_channels, patches.kernel_size[0]
        count = (image_size[0] // side) * (image_size[1] // side)
        self.patches = patches
        self.positions = nn.Parameter(_DEVIATION * torch.randn(count, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_image_size("vit", images, self.image_size)
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.classifier(self.norm(x).mean(1))
        return logits


def vit(
    *,
    classes: int = 10,
    channels: int = 3,
    image_size: int | Sequence[int] = 32,
    patch: int = 4,
    width: int = 192,
    layers: int = 6,
    heads: int = 4,
    dropout: float = 0.0,
) -> VisionTransformer:
    """Small vision transformer for CIFAR: encoder blocks over patches.

    The layers have PyTorch's initial weights. Train it with AdamW.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        image_size: Number of pixels along a side of the images, or (height, width).
        patch: Number of pixels along a side of a patch, a divisor of the image size.
        width: Size of a patch's state, a multiple of ``heads``.
        layers: Number of encoder blocks.
        heads: Number of attention heads.
        dropout: Probability of dropout, in [0, 1).

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, ``width`` is not a multiple of ``heads``,
            or the image size is not a multiple of ``patch``.

    Example:
        >>> import torch
        >>> model = vit(width=16, layers=2).eval()
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    check_arguments(
        "vit",
        classes=classes,
        channels=channels,
        image_size=image_size,
        patch=patch,
        width=width,
        layers=layers,
        heads=heads,
        dropout=dropout,
    )
    check_heads("vit", width, heads)
    size = parse_image_size("vit", image_size)
    if size[0] % patch or size[1] % patch:
        raise InputError(
            f"vit(image_size={image_size}, patch={patch}): the patches cover the images without a "
            "rest; choose a divisor of height and width as patch."
        )
    return VisionTransformer(
        nn.Conv2d(channels, width, patch, stride=patch),
        [EncoderBlock(width=width, heads=heads, dropout=dropout) for _ in range(layers)],
        nn.Linear(width, classes),
        image_size=size,
        dropout=dropout,
    )
