"""Residual networks for CIFAR: three stages of basic blocks."""

from torch import Tensor, nn

from probmask.models.arguments import check_arguments
from probmask.models.convolution import activated, convolution, normalized
from probmask.models.initialization import initialize_
from probmask.models.residual import Residual


class CifarResNet(nn.Module):
    """A 3 by 3 convolution, three stages that double the channels, and a 1 by 1 classifier."""

    def __init__(
        self, *, blocks: int, classes: int, channels: int, width: int, stem_stride: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*activated(channels, width, 3, stride=stem_stride))
        self.stages = nn.Sequential(
            _stage(width, width, blocks=blocks, stride=1),
            _stage(width, 2 * width, blocks=blocks, stride=2),
            _stage(2 * width, 4 * width, blocks=blocks, stride=2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = convolution(4 * width, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(images))))
        return logits.flatten(1)


def resnet32(
    *, classes: int = 10, channels: int = 3, width: int = 32, stem_stride: int = 1
) -> CifarResNet:
    """ResNet32 of double width for CIFAR: five basic blocks per stage.

    ``stem_stride=2`` halves the images at once, for small machines.
    """
    return _build(
        "resnet32", 5, classes=classes, channels=channels, width=width, stem_stride=stem_stride
    )


def resnet20(
    *, classes: int = 10, channels: int = 3, width: int = 16, stem_stride: int = 1
) -> CifarResNet:
    """ResNet20 for CIFAR: three basic blocks per stage.

    ``stem_stride=2`` halves the images at once, for small machines.
    """
    return _build(
        "resnet20", 3, classes=classes, channels=channels, width=width, stem_stride=stem_stride
    )


def resnet14(
    *, classes: int = 10, channels: int = 3, width: int = 16, stem_stride: int = 1
) -> CifarResNet:
    """ResNet14 for CIFAR: two basic blocks per stage.

    ``stem_stride=2`` halves the images at once, for small machines.
    """
    return _build(
        "resnet14", 2, classes=classes, channels=channels, width=width, stem_stride=stem_stride
    )


def _build(
    name: str, blocks: int, *, classes: int, channels: int, width: int, stem_stride: int
) -> CifarResNet:
    check_arguments(name, classes=classes, channels=channels, width=width, stem_stride=stem_stride)
    return CifarResNet(
        blocks=blocks, classes=classes, channels=channels, width=width, stem_stride=stem_stride
    )


def _stage(inputs: int, outputs: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = _basic_block(inputs, outputs, stride=stride)
    others = (_basic_block(outputs, outputs, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def _basic_block(inputs: int, outputs: int, *, stride: int) -> Residual:
    """Two 3 by 3 convolutions."""
    body = nn.Sequential(
        *activated(inputs, outputs, 3, stride=stride), *normalized(outputs, outputs, 3)
    )
    return Residual(body, inputs, outputs, stride=stride)
