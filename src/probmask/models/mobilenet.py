"""MobileNetV1 for ImageNet, which alternates depthwise and 1×1 convolutions."""

from torch import Tensor, nn

from probmask.models.blocks import check_arguments, conv, conv_bn_relu, initialize_

# Per pair of convolutions: output channels as a multiple of the width, and stride.
_PAIRS = ((2, 1), (4, 2), (4, 1), (8, 2), (8, 1), (16, 2), *[(16, 1)] * 5, (32, 2), (32, 1))


class MobileNetV1(nn.Module):
    """A 3×3 convolution, thirteen depthwise-separable convolutions, and a 1×1 classifier."""

    def __init__(self, *, classes: int, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn_relu(channels, width, 3, stride=2))
        pairs, inputs = [], width
        for multiple, stride in _PAIRS:
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
