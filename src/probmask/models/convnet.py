"""Convolutional networks without shortcuts.

SmallConv is for digits, LeNet-5 for MNIST, Conv-4 and VGG19 are for CIFAR, and MobileNetV1 is for
ImageNet.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from probmask.errors import InputError
from probmask.models.blocks import (
    check_arguments,
    check_image_size,
    check_min_image_size,
    conv,
    conv_bn_relu,
    initialize_,
    initialize_layer_,
    parse_image_size,
)

# VGG19, per stage: channels as a multiple of the width, and number of convolutions.
_VGG_STAGES = ((1, 2), (2, 2), (4, 4), (8, 4), (8, 4))
# Two unpadded 5x5 convolutions, each with a pooling layer, leave one pixel of 16.
_LENET5_MIN_SIZE = 16
# MobileNetV1, per pair of convolutions: output channels as a multiple of the width, and stride.
_MOBILENET = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


class SmallConv(nn.Module):
    """Four 3×3 convolutions with BatchNorm, two max poolings, and a linear classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_initialized_conv_bn_relu(channels, width),
            *_initialized_conv_bn_relu(width, width),
            nn.MaxPool2d(2),
            *_initialized_conv_bn_relu(width, 2 * width),
            *_initialized_conv_bn_relu(2 * width, 2 * width),
            nn.MaxPool2d(2),
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        # The classifier keeps PyTorch's default initialization.
        self.classifier = nn.Linear(2 * width, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_min_image_size("smallconv", images, 4)  # the poolings divide each side by 4
        logits: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return logits


class LeNet5(nn.Module):
    """Two 5×5 convolutions and two linear layers; BatchNorm after all but the last; no biases."""

    def __init__(
        self, *, classes: int, channels: int, width: int, image_size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.image_size = image_size
        outputs, hidden = 5 * width // 2, 25 * width
        self.features = nn.Sequential(
            *_unpadded_conv_bn_relu_pool(channels, width),
            *_unpadded_conv_bn_relu_pool(width, outputs),
        )
        height, length = (((side - 4) // 2 - 4) // 2 for side in image_size)
        self.classifier = nn.Sequential(
            nn.Linear(outputs * height * length, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes, bias=False),
        )
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_image_size("lenet5", images, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class Conv4(nn.Module):
    """Four 3×3 convolutions in two pairs, and three linear layers; no BatchNorm, no biases."""

    def __init__(
        self, *, classes: int, channels: int, width: int, image_size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.features = nn.Sequential(
            *_conv_pair(channels, width),
            *_conv_pair(width, 2 * width),
        )
        positions = (image_size[0] // 4) * (image_size[1] // 4)
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * positions, 4 * width, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4 * width, 4 * width, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(4 * width, classes, bias=False),
        )
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_image_size("conv4", images, self.image_size)
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class VGG19(nn.Module):
    """Sixteen 3×3 convolutions with BatchNorm in five stages, and a 1×1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels
        for multiple, convolutions in _VGG_STAGES:
            for _ in range(convolutions):
                layers += conv_bn_relu(inputs, multiple * width, 3)
                inputs = multiple * width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        # Images of 32 by 32 are reduced to one position, which this pooling leaves unchanged.
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = conv(inputs, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_min_image_size("vgg19", images, 2 ** len(_VGG_STAGES))
        logits: Tensor = self.classifier(self.pool(self.features(images)))
        return logits.flatten(1)


def smallconv(*, classes: int = 10, channels: int = 1, width: int = 40) -> SmallConv:
    """Four convolutions with BatchNorm and a classifier, for the digits.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.

    Returns:
        The network, with new random weights. It takes images of at least 4×4 pixels.

    Raises:
        InputError: If an argument is not a positive integer.

    Example:
        >>> import torch
        >>> model = smallconv(classes=10, channels=1)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    check_arguments("smallconv", classes=classes, channels=channels, width=width)
    return SmallConv(classes=classes, channels=channels, width=width)


def lenet5(
    *,
    classes: int = 10,
    channels: int = 1,
    width: int = 20,
    image_size: int | Sequence[int] = 28,
) -> LeNet5:
    """LeNet-5 in Caffe's sizes, with BatchNorm, for MNIST.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.
        image_size: Side of the images in pixels, or ``[height, width]``.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If an argument is not a positive integer, or a side is shorter than 16 pixels.

    Example:
        >>> import torch
        >>> model = lenet5(width=4).eval()
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    check_arguments("lenet5", classes=classes, channels=channels, width=width)
    size = parse_image_size("lenet5", image_size)
    if min(size) < _LENET5_MIN_SIZE:
        raise InputError(
            f"lenet5(image_size={image_size!r}): its convolutions and pooling layers need images "
            f"of at least {_LENET5_MIN_SIZE}×{_LENET5_MIN_SIZE}; use lenet300 or smallconv."
        )
    return LeNet5(classes=classes, channels=channels, width=width, image_size=size)


def conv4(
    *,
    classes: int = 10,
    channels: int = 3,
    width: int = 64,
    image_size: int | Sequence[int] = 32,
) -> Conv4:
    """Conv-4: four convolutions and three linear layers, no BatchNorm.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.
        image_size: Side of the images in pixels, or ``[height, width]``. The size of the first
            linear layer depends on it.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If an argument is not a positive integer, or a side is shorter than 4 pixels.

    Example:
        >>> import torch
        >>> model = conv4(width=4, image_size=[28, 32])
        >>> model(torch.zeros(2, 3, 28, 32)).shape
        torch.Size([2, 10])
    """
    check_arguments("conv4", classes=classes, channels=channels, width=width)
    size = parse_image_size("conv4", image_size)
    return Conv4(classes=classes, channels=channels, width=width, image_size=size)


def vgg19(*, classes: int = 10, channels: int = 3, width: int = 64) -> VGG19:
    """VGG19 for CIFAR: sixteen convolutions with BatchNorm in five stages.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.

    Returns:
        The network, with new random weights. It takes images of at least 32×32 pixels.

    Raises:
        InputError: If an argument is not a positive integer.

    Example:
        >>> import torch
        >>> model = vgg19(classes=100, width=4).eval()
        >>> model(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    check_arguments("vgg19", classes=classes, channels=channels, width=width)
    return VGG19(classes=classes, channels=channels, width=width)


def _initialized_conv_bn_relu(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    layers = conv_bn_relu(inputs, outputs, 3)
    initialize_layer_(layers[0])
    return layers


def _unpadded_conv_bn_relu_pool(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(inputs, outputs, 5, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )


def _conv_pair(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        conv(inputs, outputs, 3),
        nn.ReLU(inplace=True),
        conv(outputs, outputs, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )


class MobileNetV1(nn.Module):
    """A 3×3 convolution, thirteen depthwise-separable convolutions, and a 1×1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn_relu(channels, width, 3, stride=2))
        pairs, inputs = [], width
        for multiple, stride in _MOBILENET:
            pairs.append(_depthwise_separable(inputs, multiple * width, stride=stride))
            inputs = multiple * width
        self.features = nn.Sequential(*pairs)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = conv(inputs, classes, 1)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        logits: Tensor = self.classifier(self.pool(self.features(self.stem(images))))
        return logits.flatten(1)


def mobilenetv1(*, classes: int = 1000, channels: int = 3, width: int = 32) -> MobileNetV1:
    """MobileNetV1 for ImageNet: thirteen depthwise-separable convolutions.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of channels of the first layer; all other layers scale with it.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If an argument is not a positive integer.

    Example:
        >>> import torch
        >>> model = mobilenetv1(classes=10, width=4).eval()
        >>> model(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 10])
    """
    check_arguments("mobilenetv1", classes=classes, channels=channels, width=width)
    return MobileNetV1(classes=classes, channels=channels, width=width)


def _depthwise_separable(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    """Return a 3×3 convolution with one filter per channel, then a 1×1 convolution."""
    return nn.Sequential(
        *conv_bn_relu(inputs, inputs, 3, stride=stride, groups=inputs),
        *conv_bn_relu(inputs, outputs, 1),
    )
