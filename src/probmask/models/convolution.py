"""The convolution that the networks are made of: without bias, padded to keep the image's size."""

from torch import nn


def convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    """A convolution with an odd ``kernel`` that divides the sides by ``stride``, rounding up."""
    return nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )


def normalized(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution and its BatchNorm."""
    layer = convolution(inputs, outputs, kernel, stride=stride, groups=groups)
    return layer, nn.BatchNorm2d(outputs)


def activated(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
    """A convolution, its BatchNorm and a ReLU."""
    layers = normalized(inputs, outputs, kernel, stride=stride, groups=groups)
    return *layers, nn.ReLU(inplace=True)
