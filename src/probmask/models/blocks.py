"""Building blocks of the networks: layers, initialization, and checks of sizes.

Convolutions have no bias and are padded so that a stride of 1 keeps the image size.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from probmask.checks import check_choice, check_count, check_value, check_within
from probmask.errors import InputError

# Integer arguments of networks, and what they mean.
_SIZES = {
    "classes": "the number of classes",
    "channels": "the number of image channels",
    "width": "the number of channels of the first layer",
    "vocabulary": "the number of different tokens",
    "max_length": "the largest number of tokens of a sentence",
    "positions": "the largest number of tokens of a sentence",
    "patch": "the number of pixels along a side of a patch",
    "layers": "the number of encoder blocks",
    "heads": "the number of attention heads",
}
# The shortcut of a residual block whose input and output differ in shape.
Shortcut = Literal["conv", "pad"]
_SHORTCUTS = ("conv", "pad")


class Residual(nn.Module):
    """A residual block, relu(body(x) + shortcut(x)).

    The shortcut is the identity if the shapes are the same. Otherwise it is a 1×1 convolution with
    BatchNorm ("conv", option B of the ResNet paper), or a `PaddedShortcut` ("pad", option A).
    """

    def __init__(
        self,
        body: nn.Sequential,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        shortcut: Shortcut = "conv",
    ) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif shortcut == "pad":
            self.shortcut = PaddedShortcut(inputs, outputs, stride=stride)
        else:
            self.shortcut = nn.Sequential(*conv_bn(inputs, outputs, 1, stride=stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(body(x) + shortcut(x))."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class PaddedShortcut(nn.Module):
    """Every stride-th pixel, with channels of zeros added equally on both sides; no weights."""

    def __init__(self, inputs: int, outputs: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        """Return the images with fewer pixels and more channels."""
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Return a convolution with an odd kernel size, whose output sides are ceil(side / stride)."""
    return nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )


def pixel_classifier(inputs: int, classes: int, *, bias: bool) -> nn.Conv2d:
    """Return a classifier of pooled features: a 1×1 convolution, whose bias is zero at first."""
    layer = nn.Conv2d(inputs, classes, 1, bias=bias)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def conv_bn(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Return a convolution and its BatchNorm."""
    layer = conv(inputs, outputs, kernel, stride=stride, groups=groups)
    return layer, nn.BatchNorm2d(outputs)


def conv_bn_relu(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
    """Return a convolution, its BatchNorm and a ReLU."""
    layers = conv_bn(inputs, outputs, kernel, stride=stride, groups=groups)
    return *layers, nn.ReLU(inplace=True)


def initialize_(model: nn.Module) -> None:
    """Initialize all convolutions and linear layers as in the paper, and BatchNorm to 1 and 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            initialize_layer_(module)
        elif isinstance(module, _BatchNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def initialize_layer_(layer: nn.Conv2d | nn.Linear) -> None:
    """Draw the weights of a layer from N(0, 2 / fan_in), as in the paper."""
    nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")


def check_arguments(caller: str, **arguments: object) -> None:
    """Raise InputError if a network cannot be built with one of the values."""
    for name, value in arguments.items():
        if name in _SIZES:
            check_count(caller, name, value, least=1, meaning=_SIZES[name])
        elif name == "stem_stride":
            check_count(caller, name, value, least=1, meaning="the stride of the first layer")
            check_choice(caller, name, value, (1, 2))
        elif name == "image_size":
            parse_image_size(caller, value)
        elif name == "dropout":
            check_within(caller, name, value, 0, 1 - 2**-24, meaning="a probability")
        elif name == "shortcut":
            check_choice(caller, name, value, _SHORTCUTS)
        elif name == "classifier_bias":
            check_value(caller, name, value, bool)


def check_heads(caller: str, width: int, heads: int) -> None:
    """Raise InputError if the attention heads cannot share the width evenly."""
    if width % heads:
        raise InputError(
            f"{caller}(width={width}, heads={heads}): the heads share the width evenly; choose a "
            f"multiple of {heads}."
        )


# The two poolings of conv4, one of the networks that take `image_size`, divide each side by 4.
_MIN_IMAGE_SIZE = 4


def parse_image_size(caller: str, size: object) -> tuple[int, int]:
    """Return (height, width) from one number or a pair.

    Raises:
        InputError: If `size` is neither, or a side is shorter than 4 pixels.
    """
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        raise InputError(
            f"{caller}(image_size={size!r}): image_size is one number, or [height, width]."
        )
    meaning = "the number of pixels along a side of the images"
    for side in pair:
        check_count(caller, "image_size", side, least=_MIN_IMAGE_SIZE, meaning=meaning)
    return pair


def check_min_image_size(network: str, images: Tensor, least: int) -> None:
    """Raise InputError if the pooling layers would reduce the images to nothing."""
    height, width = _image_size(images) or (least, least)
    if height < least or width < least:
        raise InputError(
            f"{network}: the images are {height}×{width}, but its pooling layers need at least "
            f"{least}×{least}; use larger images or another network."
        )


def check_image_size(network: str, images: Tensor, size: Sequence[int]) -> None:
    """Raise InputError if the images do not have the size that the linear layers expect."""
    height, width = _image_size(images) or size
    if height != size[0] or width != size[1]:
        raise InputError(
            f"{network}: the images are {height}×{width}, but it was built for "
            f"{size[0]}×{size[1]}; build it with image_size=[{height}, {width}]."
        )


def _image_size(images: Tensor) -> tuple[int, int] | None:
    """Return (height, width), or None for the proxy that a symbolic tracer passes."""
    return (images.shape[-2], images.shape[-1]) if isinstance(images, Tensor) else None
