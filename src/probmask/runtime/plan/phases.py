"""Transposed convolutions as convolutions whose outputs are phases of the image.

Output position q · stride + p, of phase p, reads the input at q + (p + padding - k · dilation) /
stride, for the kernel elements k for which this is an integer. So each phase is a convolution with
stride 1, and all of them are one, with a channel for each output channel and phase.
"""

import numpy as np

from probmask.runtime.lower.nodes import (
    Convolution,
    Form,
    TransposedConvolution,
    unset_call,
)

# Index in the kernel, phase, and shift from the output's position in the phase to the input's.
_Tap = tuple[int, int, int]


def phase_convolution(node: TransposedConvolution) -> Convolution:
    """Return the convolution that computes all phases, ordered by channel, row and column."""
    assert node.form is not None
    kernel = node.weight.shape[2:]
    settings = zip(kernel, node.stride, node.padding, node.dilation, strict=True)
    rows, columns = (_taps(*setting) for setting in settings)
    top, left = (min(shift for *_, shift in taps) for taps in (rows, columns))
    height, width = (
        max(shift for *_, shift in taps) - least + 1
        for taps, least in ((rows, top), (columns, left))
    )
    inputs, per_group = node.weight.shape[:2]
    outputs, phases = per_group * node.groups, node.stride[0] * node.stride[1]
    grouped = node.weight.reshape(node.groups, inputs // node.groups, per_group, *kernel)
    exchanged = grouped.swapaxes(1, 2).reshape(outputs, inputs // node.groups, *kernel)
    weight = np.zeros((outputs, *node.stride, inputs // node.groups, height, width), np.float32)
    for row, phase_y, y in rows:
        for column, phase_x, x in columns:
            weight[:, phase_y, phase_x, :, y - top, x - left] = exchanged[:, :, row, column]
    height, width = -(-node.form.height // node.stride[0]), -(-node.form.width // node.stride[1])
    return Convolution(
        node.name if phases == 1 else f"{node.name}_phases",
        node.inputs,
        unset_call,
        node.label,
        form=Form(node.form.leading, outputs * phases, height, width),
        input_forms=node.input_forms,
        views=node.views,
        weight=weight.reshape(outputs * phases, *weight.shape[3:]),
        bias=np.repeat(node.bias, phases),
        padding=((-top, 0), (-left, 0)),
        groups=node.groups,
        activation=node.activation,
    )


def _taps(kernel: int, stride: int, padding: int, dilation: int) -> list[_Tap]:
    taps = []
    for k in range(kernel):
        phase = (k * dilation - padding) % stride
        taps.append((k, phase, (phase + padding - k * dilation) // stride))
    return taps
