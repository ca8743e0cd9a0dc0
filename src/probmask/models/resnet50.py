"""ResNet50 for ImageNet, with the stride on the 3 by 3 convolution of a block."""

from torch import Tensor, nn

from probmask.models.arguments import check_sizes
from probmask.models.convolution import activated, convolution, normalized
from probmask.models.initialization import initialize_

# Blocks per stage; each stage has twice the channels of the one before.
_BLOCKS = (3, 4, 6, 3)
# A block's output has so many times the channels of its 3 by 3 convolution.
_EXPANSION = 4


class Bottleneck(nn.Module):
    """A 1 by 1, a 3 by 3 and a 1 by 1 convolution around which a shortcut leads."""

    def __init__(self, inputs: int, middle: int, *, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * middle
        self.body = nn.Sequential(
            *activated(inputs, middle, 1),
            *activated(middle, middle, 3, stride=stride),
            *normalized(middle, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*normalized(inputs, outputs, 1, stride=stride))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


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
    check_sizes("resnet50", classes=classes, channels=channels, width=width)
    return ResNet50(classes=classes, channels=channels, width=width)


def _stage(inputs: int, middle: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, middle, stride=stride)
    others = (Bottleneck(_EXPANSION * middle, middle, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)
