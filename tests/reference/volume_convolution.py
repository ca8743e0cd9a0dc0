"""A 3-D convolution by its definition: the sum of products at each place of the output."""

from itertools import product

import numpy as np


def volume_convolution(volume, layer):
    """Return the output of a `Conv3d` with numbers as paddings for one volume, an array."""
    padded = np.pad(volume.astype(np.float64), [(0, 0), *((n, n) for n in layer.padding)])
    weight = layer.weight.detach().numpy()
    bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().numpy()
    spans = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    sizes = [
        (size - span) // step + 1
        for size, span, step in zip(padded.shape[1:], spans, layer.stride, strict=True)
    ]
    result = np.zeros((len(weight), *sizes))
    inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    for o, *place in product(range(len(weight)), *map(range, sizes)):
        first = o // outputs * inputs
        read = padded[first : first + inputs]
        for axis in range(3):
            start = place[axis] * layer.stride[axis]
            indices = range(start, start + spans[axis], layer.dilation[axis])
            read = read.take(indices, axis + 1)
        result[o, *place] = (read * weight[o]).sum() + bias[o]
    return result
