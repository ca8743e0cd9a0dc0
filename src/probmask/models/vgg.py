"""VGG19 with BatchNorm, as used on CIFAR: one convolution is the whole classifier."""

from torch import Tensor, nn

from probmask.models.arguments import check_arguments, check_at_least
from probmask.models.convolution import activated, convolution
from probmask.models.initialization import initialize_

# Per stage: channels in units of the width, and convolutions before the pooling.
_STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))
# Each of the five stages halves the image.
_SMALLEST = 2 ** len(_STAGES)


class VGG19(nn.Module):
    """Sixteen 3 by 3 convolutions with BatchNorm in five stages, and a 1 by 1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for multiple, convolutions in _STAGES:
            for _ in range(convolutions):
                layers += activated(inputs, multiple * width, 3)
                inputs = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # Does nothing for images of 32 by 32, of which one position is left here.
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = convolution(inputs, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_at_least("vgg19", images, _SMALLEST)
        logits: Tensor = self.classifier(self.pool(self.features(images)))
        return logits.flatten(1)


def vgg19(*, classes: int = 10, channels: int = 3, width: int = 64) -> VGG19:
    """VGG19 for CIFAR: sixteen convolutions with BatchNorm in five stages."""
    check_arguments("vgg19", classes=classes, channels=channels, width=width)
    return VGG19(classes=classes, channels=channels, width=width)
