"""Conv-4, the small network that the paper tunes its learning rate of scores on."""

from collections.abc import Sequence

from torch import Tensor, nn

from probmask.models.arguments import (
    SMALLEST_SIDE,
    check_arguments,
    check_exactly,
    height_and_width,
)
from probmask.models.convolution import convolution
from probmask.models.initialization import initialize_


class Conv4(nn.Module):
    """Four 3 by 3 convolutions in two pairs, and three linear layers; no BatchNorm, no biases."""

    def __init__(
        self, *, classes: int, channels: int, width: int, image_size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.features = nn.Sequential(
            *_pair(channels, width),
            *_pair(width, 2 * width),
        )
        height, breadth = (side // SMALLEST_SIDE for side in image_size)
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * height * breadth, 4 * width, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4 * width, 4 * width, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4 * width, classes, bias=False),
        )
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_exactly("conv4", images, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def conv4(
    *,
    classes: int = 10,
    channels: int = 3,
    width: int = 64,
    image_size: int | Sequence[int] = 32,
) -> Conv4:
    """Conv-4: four convolutions and three linear layers, no BatchNorm.

    ``image_size`` is one number or ``[height, width]``: the first linear layer depends on it.
    """
    check_arguments("conv4", classes=classes, channels=channels, width=width)
    size = height_and_width("conv4", image_size)
    return Conv4(classes=classes, channels=channels, width=width, image_size=size)


def _pair(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        convolution(inputs, outputs, 3),
        nn.ReLU(inplace=True),
        convolution(outputs, outputs, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
