"""MobileNetV1 for ImageNet: depthwise and 1 by 1 convolutions in turn."""

from torch import Tensor, nn

from probmask.models.arguments import check_arguments
from probmask.models.convolution import activated, convolution
from probmask.models.initialization import initialize_

# Per pair of convolutions: output channels in units of the width, and stride.
_PAIRS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


class MobileNetV1(nn.Module):
    """A 3 by 3 convolution, thirteen depthwise-separable ones, and a 1 by 1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*activated(channels, width, 3, stride=2))
        pairs, inputs = [], width
        for multiple, stride in _PAIRS:
            pairs.append(_separable(inputs, multiple * width, stride=stride))
            inputs = multiple * width
        self.features = nn.Sequential(*pairs)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = convolution(inputs, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.features(self.stem(images))))
        return logits.flatten(1)


def mobilenetv1(*, classes: int = 1000, channels: int = 3, width: int = 32) -> MobileNetV1:
    """MobileNetV1 for ImageNet: thirteen depthwise-separable convolutions."""
    check_arguments("mobilenetv1", classes=classes, channels=channels, width=width)
    return MobileNetV1(classes=classes, channels=channels, width=width)


def _separable(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    """One filter per channel, then a mixture of the channels."""
    return nn.Sequential(
        *activated(inputs, inputs, 3, stride=stride, groups=inputs), *activated(inputs, outputs, 1)
    )
