"""A finished network as ONNX, and the comparison of ONNX Runtime with PyTorch."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from probmask.errors import InputError
from probmask.masking.batchnorm import evaluating
from probmask.version import __version__

# The oldest opset that PyTorch's exporter writes directly: most runtimes read it.
_OPSET = 18
# A protocol buffer is smaller than 2 GiB. Everything but the weights fits into half a megabyte.
_MAX_WEIGHT_BYTES = 2**31 - 2**19
# The number of pixels in the inputs of the comparison: 64 small images, or 20 of ImageNet.
_PIXELS = 2**20


@dataclass(frozen=True)
class Agreement:
    """How well two implementations of a network agree on a number of random inputs."""

    inputs: int
    largest_difference: float
    largest_output: float
    same_top1: int


def to_onnx(
    model: nn.Module, input_shape: Sequence[int], *, metadata: Mapping[str, Any] | None = None
) -> bytes:
    """Return the network as an ONNX file with one input, ``images``, of any batch size.

    Zeros stay zeros. BatchNorm is folded into the preceding weights, which only scales them.

    Args:
        model: The network. It takes one tensor and returns one tensor with a row for each input.
        input_shape: The shape of one input, without the batch dimension.
        metadata: JSON to store in the file as the property ``probmask``.

    Returns:
        The contents of the file.

    Raises:
        InputError: The network does not accept such an input, or cannot be exported.
    """
    import onnx
    import onnxscript  # noqa: F401  # required by PyTorch's exporter

    _check_size(model)
    # Two inputs: the exporter would treat a batch size of one as a constant.
    example = random_inputs(model, input_shape, 2)
    _check_runs(model, example)
    with evaluating(model), _quiet():
        try:
            program = torch.onnx.export(
                model,
                (example,),
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["logits"],
                opset_version=_OPSET,
                external_data=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise InputError(
                f"export(model): PyTorch cannot export this network to ONNX: {_reason(error)}"
            ) from error
        assert program is not None
        proto = program.model_proto
    _check_any_batch(proto)
    _strip(proto)
    proto.producer_name, proto.producer_version = "probmask", __version__
    onnx.helper.set_model_props(proto, {"probmask": json.dumps(metadata or {})})
    onnx.checker.check_model(proto)
    written: bytes = proto.SerializeToString(deterministic=True)
    return written


def compare_with_onnxruntime(
    data: bytes, model: nn.Module, input_shape: Sequence[int]
) -> Agreement:
    """Run an ONNX file and the model on the same random inputs, as one batch and the first alone.

    Args:
        data: The contents of the ONNX file.
        model: The network that it was exported from.
        input_shape: The shape of one input, without the batch dimension.

    Returns:
        The number of inputs, the largest difference, the largest output, and the number of inputs
        with the same top-1 class.

    Raises:
        InputError: ONNX Runtime cannot run the file.
    """
    import onnxruntime

    pixels = max(1, input_shape[-1] * input_shape[-2] if len(input_shape) > 1 else 1)
    count = max(4, min(64, _PIXELS // pixels))
    inputs = random_inputs(model, input_shape, count)
    with evaluating(model):
        expected = model(inputs)
    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are raised; do not log them as well
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        (computed,) = session.run(None, {"images": inputs.numpy()})
        (alone,) = session.run(None, {"images": inputs[:1].numpy()})
    except Exception as error:  # the errors of ONNX Runtime have no common class
        raise InputError(f"export(model): ONNX Runtime cannot run it: {_reason(error)}") from error
    found = torch.from_numpy(computed)
    differences = torch.cat([found - expected, torch.from_numpy(alone) - expected[:1]])
    agrees = (found.argmax(1) == expected.argmax(1)).reshape(count, -1).all(1)
    return Agreement(
        inputs=count,
        largest_difference=float(differences.abs().max()),
        largest_output=float(expected.abs().max()),
        same_top1=int(agrees.sum()),
    )


def random_inputs(model: nn.Module, shape: Sequence[int], count: int) -> Tensor:
    """Return reproducible inputs with the statistics of normalized images, in the model's dtype."""
    dtypes = [tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()]
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, *shape, generator=generator).to(dtypes[0] if dtypes else None)


def _check_size(model: nn.Module) -> None:
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if size > _MAX_WEIGHT_BYTES:
        raise InputError(
            f"export(model): its tensors take {size:,} bytes, and an ONNX file must be smaller "
            "than 2 GiB; use another format."
        )


def _check_runs(model: nn.Module, example: Tensor) -> None:
    try:
        with evaluating(model):
            output = model(example)
    except RuntimeError as error:
        raise InputError(
            f"export(input_shape={tuple(example.shape[1:])}): the network does not accept such an "
            f"input: {_reason(error)}"
        ) from error
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise InputError(
            "export(model): its output is not one tensor with a row for each input; wrap the "
            "network so that it is."
        )


def _check_any_batch(proto: Any) -> None:
    """Raise if the file takes only one batch size. The exporter does not warn about this."""
    for value in (*proto.graph.input, *proto.graph.output):
        if not value.type.tensor_type.shape.dim[0].dim_param:
            raise InputError(
                "export(model): the network uses its batch size as a constant (through len(x), "
                "int(…) or an explicit shape); use x.shape[0] or x.flatten(1) instead."
            )


def _strip(proto: Any) -> None:
    """Delete the exporter's notes on each node, which contain paths and lines of user files."""
    for part in (proto.graph, *proto.graph.node, *proto.graph.value_info, *proto.functions):
        del part.metadata_props[:]
    for tensor in (*proto.graph.initializer, *proto.graph.input, *proto.graph.output):
        del tensor.metadata_props[:]


def _reason(error: Exception) -> str:
    """Return the root cause in one line. The exporter's own message fills pages."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    line = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
    return " ".join(line.split())[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the logs and warnings of PyTorch's exporter about its own internals."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
