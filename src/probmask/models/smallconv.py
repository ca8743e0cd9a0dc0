"""A small convolutional network for small images, enough for handwritten digits."""

from torch import Tensor, nn

from probmask.models.arguments import check_arguments, check_at_least
from probmask.models.initialization import draw_

# Two poolings halve the image twice.
_SMALLEST = 4


class SmallConv(nn.Module):
    """Four 3 by 3 convolutions with BatchNorm, halving the image twice, and a linear classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(channels, width),
            *_block(width, width),
            nn.MaxPool2d(2),
            *_block(width, 2 * width),
            *_block(2 * width, 2 * width),
            nn.MaxPool2d(2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(2 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_at_least("smallconv", images, _SMALLEST)
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


def smallconv(*, classes: int = 10, channels: int = 1, width: int = 40) -> SmallConv:
    """Four convolutions with BatchNorm and a classifier, for the digits."""
    check_arguments("smallconv", classes=classes, channels=channels, width=width)
    return SmallConv(classes=classes, channels=channels, width=width)


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    draw_(convolution)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
