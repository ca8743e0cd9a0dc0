"""ResNet50 for ImageNet, with the stride on the 3 by 3 convolution of a block."""

from torch import Tensor, nn

from probmask.models.arguments import check_arguments
from probmask.models.convolution import activated, convolution, normalized
from probmask.models.initialization import initialize_
from probmask.models.residual import Residual

# Blocks per stage; each stage has twice the channels of the one before.
_BLOCKS = (3, 4, 6, 3)
# A block's output has so many times the channels of its 3 by 3 convolution.
_EXPANSION = 4


class ResNet50(nn.Module):
    """A 7 by 7 convolution, sixteen bottlenecks in four stages, and a 1 by 1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *activated(channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)
        )
        stages, inputs = [], width
        for index, blocks in enumerate(_BLOCKS):
            middle = width * 2**index
            stages.append(_stage(inputs, middle, blocks=blocks, stride=1 if index == 0 else 2))
            inputs = _EXPANSION * middle
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = convolution(inputs, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(images))))
        return logits.flatten(1)


def resnet50(*, classes: int = 1000, channels: int = 3, width: int = 64) -> ResNet50:
    """ResNet50 for ImageNet: sixteen bottleneck blocks in four stages."""
    check_arguments("resnet50", classes=classes, channels=channels, width=width)
    return ResNet50(classes=classes, channels=channels, width=width)


def _stage(inputs: int, middle: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = _bottleneck(inputs, middle, stride=stride)
    others = (_bottleneck(_EXPANSION * middle, middle, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def _bottleneck(inputs: int, middle: int, *, stride: int) -> Residual:
    """A 1 by 1, a 3 by 3 and a 1 by 1 convolution."""
    outputs = _EXPANSION * middle
    body = nn.Sequential(
        *activated(inputs, middle, 1),
        *activated(middle, middle, 3, stride=stride),
        *normalized(middle, outputs, 1),
    )
    return Residual(body, inputs, outputs, stride=stride)
