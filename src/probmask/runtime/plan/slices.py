"""The slices of a convolution on volumes: each is a convolution on images.

Slices of volumes are planes, as channels are. Output slice o reads input slices o · stride -
padding + k · dilation, for the slices k of the kernel. Away from the borders all output slices have
the same weights, which read planes at the same distances.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from probmask.runtime.lower.nodes import Convolution
from probmask.runtime.plan.tensor_layout import Longs


@dataclass(frozen=True)
class OutputSlice:
    """A slice of the output: its index, the slices of the kernel that read the input, and where.

    ``first`` is the slice of the input that the first of them reads.
    """

    index: int
    kernel: tuple[int, ...]
    first: int


def output_slices(node: Convolution) -> Iterator[OutputSlice]:
    """Return the slices of the output; there is one without depth."""
    depth = node.depth
    if depth is None:
        yield OutputSlice(0, (), 0)
        return
    for index in range(depth.outputs):
        start = index * depth.stride - depth.padding[0]
        read = {
            k: start + k * depth.dilation
            for k in range(depth.kernel)
            if 0 <= start + k * depth.dilation < depth.inputs
        }
        yield OutputSlice(index, tuple(read), next(iter(read.values()), 0))


def slice_convolution(
    node: Convolution, kernel: tuple[int, ...], offsets: Longs
) -> tuple[Convolution, Longs]:
    """Return the convolution of some slices of a kernel, and the offsets of its inputs.

    The offsets, by input channel and tap, are relative to the input slice that the first one reads.
    """
    if node.depth is None:
        return node, offsets
    depth = node.depth
    weight = node.weight.reshape(len(node.weight), -1, depth.kernel, *node.weight.shape[2:])
    weight = weight[:, :, list(kernel)].reshape(len(node.weight), -1, *node.weight.shape[2:])
    distances = np.array([(k - kernel[0]) * depth.dilation for k in kernel], np.int64)
    channels = node.groups * node.weight.shape[1] // depth.kernel
    first = np.arange(channels)[:, None] * depth.inputs
    return replace(node, weight=weight, depth=None), offsets[(first + distances).reshape(-1)]
