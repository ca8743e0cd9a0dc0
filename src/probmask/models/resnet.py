"""Residual networks: ResNet14, 20 and 32 for CIFAR, ResNet50 for ImageNet."""

import re
from typing import Any

from torch import Tensor, nn

from probmask.models.blocks import (
    Residual,
    Shortcut,
    check_arguments,
    conv_bn,
    conv_bn_relu,
    initialize_,
    pixel_classifier,
)

# ResNet50: blocks per stage. Each stage has twice the channels of the one before it.
_RESNET50_BLOCKS = (3, 4, 6, 3)
# ResNet50: output channels of a block, as a multiple of its inner channels.
_EXPANSION = 4
# The names of torchvision's networks, which others use too, and ours.
_OUTSIDE_BLOCKS = {"conv1": "stem.0", "bn1": "stem.1", "fc": "classifier", "linear": "classifier"}
_IN_BLOCK = re.compile(r"layer(\d)\.(\d+)\.(conv|bn|downsample|shortcut)(\d?)\.(.+)")


class CifarResNet(nn.Module):
    """A 3×3 convolution, three stages of basic blocks, and a 1×1 classifier."""

    def __init__(
        self,
        *,
        blocks: int,
        classes: int,
        channels: int,
        width: int,
        stem_stride: int,
        shortcut: Shortcut,
        classifier_bias: bool,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn_relu(channels, width, 3, stride=stem_stride))
        self.stages = nn.Sequential(
            _basic_stage(width, width, blocks=blocks, stride=1, shortcut=shortcut),
            _basic_stage(width, 2 * width, blocks=blocks, stride=2, shortcut=shortcut),
            _basic_stage(2 * width, 4 * width, blocks=blocks, stride=2, shortcut=shortcut),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = pixel_classifier(4 * width, classes, bias=classifier_bias)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(images))))
        return logits.flatten(1)


class ResNet50(nn.Module):
    """A 7×7 convolution, sixteen bottleneck blocks in four stages, and a 1×1 classifier.

    The stride of a block is on its 3×3 convolution, as in torchvision.
    """

    def __init__(self, *, classes: int, channels: int, width: int, classifier_bias: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *conv_bn_relu(channels, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)
        )
        stages, inputs = [], width
        for index, blocks in enumerate(_RESNET50_BLOCKS):
            middle = width * 2**index
            stride = 1 if index == 0 else 2
            stages.append(_bottleneck_stage(inputs, middle, blocks=blocks, stride=stride))
            inputs = _EXPANSION * middle
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = pixel_classifier(inputs, classes, bias=classifier_bias)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.stages(self.stem(images))))
        return logits.flatten(1)


def resnet14(
    *,
    classes: int = 10,
    channels: int = 3,
    width: int = 16,
    stem_stride: int = 1,
    shortcut: Shortcut = "conv",
    classifier_bias: bool = False,
) -> CifarResNet:
    """ResNet14 for CIFAR: two basic blocks per stage.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.
        stem_stride: Stride of the first convolution, 1 or 2. A stride of 2 halves the images,
            and costs a quarter of the computation.
        shortcut: Shortcut of a block that changes the shape: "conv", a 1×1 convolution with
            BatchNorm, or "pad", every second pixel and channels of zeros (option A of the ResNet
            paper).
        classifier_bias: Whether the classifier has a bias, as in most published weights.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, `stem_stride` is not 1 or 2, or `shortcut`
            is neither "conv" nor "pad".

    Example:
        >>> import torch
        >>> model = resnet14(stem_stride=2)
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    return _cifar_resnet(
        "resnet14",
        2,
        classes=classes,
        channels=channels,
        width=width,
        stem_stride=stem_stride,
        shortcut=shortcut,
        classifier_bias=classifier_bias,
    )


def resnet20(
    *,
    classes: int = 10,
    channels: int = 3,
    width: int = 16,
    stem_stride: int = 1,
    shortcut: Shortcut = "conv",
    classifier_bias: bool = False,
) -> CifarResNet:
    """ResNet20 for CIFAR: three basic blocks per stage.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.
        stem_stride: Stride of the first convolution, 1 or 2. A stride of 2 halves the images,
            and costs a quarter of the computation.
        shortcut: Shortcut of a block that changes the shape: "conv", a 1×1 convolution with
            BatchNorm, or "pad", every second pixel and channels of zeros (option A of the ResNet
            paper).
        classifier_bias: Whether the classifier has a bias, as in most published weights.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, `stem_stride` is not 1 or 2, or `shortcut`
            is neither "conv" nor "pad".

    Example:
        >>> sum(parameter.numel() for parameter in resnet20().parameters())
        272464
    """
    return _cifar_resnet(
        "resnet20",
        3,
        classes=classes,
        channels=channels,
        width=width,
        stem_stride=stem_stride,
        shortcut=shortcut,
        classifier_bias=classifier_bias,
    )


def resnet32(
    *,
    classes: int = 10,
    channels: int = 3,
    width: int = 32,
    stem_stride: int = 1,
    shortcut: Shortcut = "conv",
    classifier_bias: bool = False,
) -> CifarResNet:
    """ResNet32 of double width for CIFAR: five basic blocks per stage.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it. The paper
            uses 32, twice the usual width.
        stem_stride: Stride of the first convolution, 1 or 2. A stride of 2 halves the images,
            and costs a quarter of the computation.
        shortcut: Shortcut of a block that changes the shape: "conv", a 1×1 convolution with
            BatchNorm, or "pad", every second pixel and channels of zeros (option A of the ResNet
            paper).
        classifier_bias: Whether the classifier has a bias, as in most published weights.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer, `stem_stride` is not 1 or 2, or `shortcut`
            is neither "conv" nor "pad".

    Example:
        >>> sum(parameter.numel() for parameter in resnet32(classes=100).parameters())
        1872032
    """
    return _cifar_resnet(
        "resnet32",
        5,
        classes=classes,
        channels=channels,
        width=width,
        stem_stride=stem_stride,
        shortcut=shortcut,
        classifier_bias=classifier_bias,
    )


def resnet50(
    *, classes: int = 1000, channels: int = 3, width: int = 64, classifier_bias: bool = False
) -> ResNet50:
    """ResNet50 for ImageNet: sixteen bottleneck blocks in four stages.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.
        classifier_bias: Whether the classifier has a bias, as in torchvision.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If a size is not a positive integer.

    Example:
        >>> import torch
        >>> model = resnet50(classes=10, width=4).eval()
        >>> model(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    sizes = {"classes": classes, "channels": channels, "width": width}
    check_arguments("resnet50", **sizes, classifier_bias=classifier_bias)
    return ResNet50(**sizes, classifier_bias=classifier_bias)


def resnet_name(name: str) -> str:
    """Return the name here of a tensor in a file of torchvision's residual networks.

    Other names, and those of this file, are returned unchanged.

    Example:
        >>> resnet_name("layer2.0.bn1.weight")
        'stages.1.0.body.1.weight'
    """
    found = _IN_BLOCK.fullmatch(name)
    if found is None:
        first, dot, rest = name.partition(".")
        return _OUTSIDE_BLOCKS.get(first, first) + dot + rest
    stage, block, kind, number, rest = found.groups()
    place = f"stages.{int(stage) - 1}.{block}"
    if not number:
        return f"{place}.shortcut.{rest}"
    # `body` has a convolution, BatchNorm and ReLU in turn.
    return f"{place}.body.{3 * (int(number) - 1) + (kind == 'bn')}.{rest}"


def _cifar_resnet(name: str, blocks: int, **settings: Any) -> CifarResNet:
    check_arguments(name, **settings)
    return CifarResNet(blocks=blocks, **settings)


def _basic_stage(
    inputs: int, outputs: int, *, blocks: int, stride: int, shortcut: Shortcut
) -> nn.Sequential:
    first = _basic_block(inputs, outputs, stride=stride, shortcut=shortcut)
    others = (_basic_block(outputs, outputs, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def _basic_block(
    inputs: int, outputs: int, *, stride: int, shortcut: Shortcut = "conv"
) -> Residual:
    """Return a residual block of two 3×3 convolutions."""
    body = nn.Sequential(
        *conv_bn_relu(inputs, outputs, 3, stride=stride), *conv_bn(outputs, outputs, 3)
    )
    return Residual(body, inputs, outputs, stride=stride, shortcut=shortcut)


def _bottleneck_stage(inputs: int, middle: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = _bottleneck_block(inputs, middle, stride=stride)
    others = (_bottleneck_block(_EXPANSION * middle, middle, stride=1) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)


def _bottleneck_block(inputs: int, middle: int, *, stride: int) -> Residual:
    """Return a residual block of a 1×1, a 3×3 and a 1×1 convolution."""
    outputs = _EXPANSION * middle
    body = nn.Sequential(
        *conv_bn_relu(inputs, middle, 1),
        *conv_bn_relu(middle, middle, 3, stride=stride),
        *conv_bn(middle, outputs, 1),
    )
    return Residual(body, inputs, outputs, stride=stride)
