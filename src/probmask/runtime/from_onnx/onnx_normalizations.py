"""Operators of ONNX that normalize."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

from probmask.runtime.from_onnx.onnx_file import Operation
from probmask.runtime.from_onnx.onnx_values import Operator, optional_tensor, tensor, unsupported


def _batch_normalization(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, scale, bias, mean, variance = map(tensor, inputs)
    if op.attributes.get("training_mode", 0):
        raise unsupported(op, "training_mode")
    epsilon = op.attributes.get("epsilon", 1e-5)
    return functional.batch_norm(x, mean, variance, scale, bias, training=False, eps=epsilon)


def _layer_normalization(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, scale, bias = tensor(inputs[0]), optional_tensor(inputs, 1), optional_tensor(inputs, 2)
    axis = op.attributes.get("axis", -1) % x.dim()
    shape = [int(size) for size in x.shape[axis:]]
    epsilon = op.attributes.get("epsilon", 1e-5)
    if scale is not None and list(scale.shape) != shape:
        scale = scale.expand(shape)
    return functional.layer_norm(x, shape, scale, bias, epsilon)


def _rms_normalization(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, scale = tensor(inputs[0]), tensor(inputs[1])
    axis = op.attributes.get("axis", -1) % x.dim()
    shape = [int(size) for size in x.shape[axis:]]
    return functional.rms_norm(x, shape, scale, op.attributes.get("epsilon", 1e-5))


def _instance_normalization(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, scale, bias = map(tensor, inputs)
    epsilon = op.attributes.get("epsilon", 1e-5)
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


def _group_normalization(op: Operation, inputs: Sequence[Any], _: int) -> Any:
    x, scale, bias = map(tensor, inputs)
    groups, channels = op.attributes["num_groups"], x.shape[1]
    if len(scale) != channels:  # one number per group, up to version 20
        repeats = int(channels) // groups
        scale, bias = scale.repeat_interleave(repeats), bias.repeat_interleave(repeats)
    return functional.group_norm(x, groups, scale, bias, op.attributes.get("epsilon", 1e-5))


def _softmax(function: Callable[..., Tensor]) -> Operator:
    def apply(op: Operation, inputs: Sequence[Any], opset: int) -> Any:
        x = tensor(inputs[0])
        axis = op.attributes.get("axis", -1 if opset >= 13 else 1) % max(1, x.dim())
        if opset >= 13 or axis == x.dim() - 1:
            return function(x, axis)
        return function(x.flatten(axis), axis).reshape(x.shape)

    return apply


NORMALIZATIONS: dict[str, Operator] = {
    "BatchNormalization": _batch_normalization,
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": _instance_normalization,
    "LayerNormalization": _layer_normalization,
    "LogSoftmax": _softmax(functional.log_softmax),
    "RMSNormalization": _rms_normalization,
    "Softmax": _softmax(functional.softmax),
}
