"""Expected layers of each network, written down independently of the implementation."""

from typing import NamedTuple


class Layer(NamedTuple):
    """Number of weights, and number of output positions at which each weight is used."""

    weights: int
    positions: int


def conv(inputs, outputs, kernel, side, *, groups=1):
    return Layer(inputs // groups * outputs * kernel * kernel, side * side)


def lenet300(*, classes=10, width=100, side=28):
    return [
        Layer(side * side * 3 * width, 1),
        Layer(3 * width * width, 1),
        Layer(width * classes, 1),
    ]


def lenet5(*, classes=10, width=20, side=28):
    first = side - 4
    second = first // 2 - 4
    outputs, pooled = 5 * width // 2, second // 2
    return [
        conv(1, width, 5, first),
        conv(width, outputs, 5, second),
        Layer(outputs * pooled * pooled * 25 * width, 1),
        Layer(25 * width * classes, 1),
    ]


def conv4(*, classes=10, width=64, side=32):
    half, quarter = side // 2, side // 4
    return [
        conv(3, width, 3, side),
        conv(width, width, 3, side),
        conv(width, 2 * width, 3, half),
        conv(2 * width, 2 * width, 3, half),
        Layer(2 * width * quarter * quarter * 4 * width, 1),
        Layer(4 * width * 4 * width, 1),
        Layer(4 * width * classes, 1),
    ]


def vgg19(*, classes=10, width=64, side=32):
    layers, inputs = [], 3
    for multiple, count in [(1, 2), (2, 2), (4, 4), (8, 4), (8, 4)]:
        for _ in range(count):
            layers.append(conv(inputs, multiple * width, 3, side))
            inputs = multiple * width
        side //= 2
    return [*layers, conv(inputs, classes, 1, 1)]


def cifar_resnet(blocks, *, classes=10, width, side=32):
    layers, inputs = [conv(3, width, 3, side)], width
    for stage in range(3):
        outputs = width * 2**stage
        if stage > 0:
            side //= 2
        for block in range(blocks):
            layers += [conv(inputs, outputs, 3, side), conv(outputs, outputs, 3, side)]
            if block == 0 and stage > 0:
                layers.append(conv(inputs, outputs, 1, side))
            inputs = outputs
    return [*layers, conv(inputs, classes, 1, 1)]


def resnet50(*, classes=1000, width=64, side=224):
    layers, inputs = [conv(3, width, 7, side // 2)], width
    side //= 4
    for stage, blocks in enumerate([3, 4, 6, 3]):
        middle = width * 2**stage
        for block in range(blocks):
            layers.append(conv(inputs, middle, 1, side))  # the stride is on the next one
            if block == 0 and stage > 0:
                side //= 2
            layers += [conv(middle, middle, 3, side), conv(middle, 4 * middle, 1, side)]
            if block == 0:
                layers.append(conv(inputs, 4 * middle, 1, side))
            inputs = 4 * middle
    return [*layers, conv(inputs, classes, 1, 1)]


def mobilenetv1(*, classes=1000, width=32, side=224):
    side //= 2
    layers, inputs = [conv(3, width, 3, side)], width
    for multiple in [2, 4, 4, 8, 8, 16, 16, 16, 16, 16, 16, 32, 32]:
        outputs = multiple * width
        if outputs > inputs and multiple > 2:
            side //= 2
        layers.append(conv(inputs, inputs, 3, side, groups=inputs))
        layers.append(conv(inputs, outputs, 1, side))
        inputs = outputs
    return [*layers, conv(inputs, classes, 1, 1)]
