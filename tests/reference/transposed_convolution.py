"""A transposed convolution by its definition: each input is spread over the output."""

import torch


def transposed_convolution(image, layer):
    """Return the output of a `ConvTranspose2d` for one image, in loops."""
    channels, height, width = image.shape
    outputs, groups = layer.out_channels, layer.groups
    (step_y, step_x), (top, left) = layer.stride, layer.padding
    (wide_y, wide_x), kernel = layer.dilation, layer.kernel_size
    rows, columns = (
        (size - 1) * step - 2 * pad + wide * (k - 1) + extra + 1
        for size, step, pad, wide, k, extra in zip(
            (height, width), layer.stride, layer.padding, layer.dilation, kernel,
            layer.output_padding, strict=True,
        )
    )  # fmt: skip
    result = torch.zeros(outputs, rows, columns)
    if layer.bias is not None:
        result += layer.bias.detach()[:, None, None]
    per_group = outputs // groups
    for c in range(channels):
        first = c // (channels // groups) * per_group
        for y in range(height):
            for x in range(width):
                for i in range(kernel[0]):
                    for j in range(kernel[1]):
                        row = y * step_y - top + i * wide_y
                        column = x * step_x - left + j * wide_x
                        if 0 <= row < rows and 0 <= column < columns:
                            spread = image[c, y, x] * layer.weight.detach()[c, :, i, j]
                            result[first : first + per_group, row, column] += spread
    return result
