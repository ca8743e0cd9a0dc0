"""LeNet-300-100, the fully connected network of many pruning studies, with BatchNorm."""

from collections.abc import Sequence

from torch import Tensor, nn

from probmask.models.blocks import (
    check_arguments,
    check_image_size,
    initialize_,
    parse_image_size,
)


class LeNet300(nn.Module):
    """Two hidden linear layers with BatchNorm and ReLU, and a linear classifier; no biases."""

    def __init__(
        self, *, classes: int, channels: int, width: int, image_size: tuple[int, int]
    ) -> None:
        super().__init__()
        self.image_size = image_size
        pixels = channels * image_size[0] * image_size[1]
        self.features = nn.Sequential(
            *_linear_bn_relu(pixels, 3 * width),
            *_linear_bn_relu(3 * width, width),
        )
        self.classifier = nn.Linear(width, classes, bias=False)
        initialize_(self)

    def forward(self, images: Tensor) -> Tensor:
        """Return one logit per class."""
        check_image_size("lenet300", images, self.image_size)
        logits: Tensor = self.classifier(self.features(images.flatten(1)))
        return logits


def lenet300(
    *,
    classes: int = 10,
    channels: int = 1,
    width: int = 100,
    image_size: int | Sequence[int] = 28,
) -> LeNet300:
    """LeNet-300-100: three linear layers with BatchNorm, for MNIST.

    Args:
        classes: Number of classes.
        channels: Number of image channels.
        width: Number of units of the second hidden layer; the first has three times as many.
        image_size: Side of the images in pixels, or ``[height, width]``.

    Returns:
        The network, with new random weights.

    Raises:
        InputError: If an argument is not a positive integer, or a side is shorter than 4 pixels.

    Example:
        >>> import torch
        >>> model = lenet300(width=4)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    check_arguments("lenet300", classes=classes, channels=channels, width=width)
    size = parse_image_size("lenet300", image_size)
    return LeNet300(classes=classes, channels=channels, width=width, image_size=size)


def _linear_bn_relu(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return (
        nn.Linear(inputs, outputs, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    )
