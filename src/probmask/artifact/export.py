"""An artifact in the formats of others: ONNX, a dense state_dict, PyTorch's sparse tensors."""

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from probmask.artifact.load import load
from probmask.artifact.onnx import Agreement, compare_with_onnxruntime, to_onnx
from probmask.artifact.reader import ArtifactInfo
from probmask.artifact.restore import load_state, read
from probmask.checks import check_choice
from probmask.errors import ArtifactError, InputError
from probmask.files import Content, write_atomically
from probmask.models import MODELS

PathLike = str | os.PathLike[str]

# Formats, each with the suffix that stands for it.
FORMATS = {"onnx": ".onnx", "dense": ".safetensors", "torch-csr": ".pt"}
# By how much ONNX Runtime may differ from PyTorch: rounding, relative to the largest output.
_TOLERANCE = 1e-3
# Numbers of one example, which a file may choose: more than any image has, and no gigabytes.
_LARGEST_EXAMPLE = 2**26


@dataclass(frozen=True)
class Exported:
    """What was written, and for ONNX how well it agrees with PyTorch, if that could be checked."""

    path: Path
    format: str
    bytes: int
    agreement: Agreement | None


def export(
    artifact: PathLike,
    out: PathLike,
    *,
    format: str | None = None,  # noqa: A002
    model: str | None = None,
    input_shape: Sequence[int] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the network of an artifact to ``out``, in a format that others read.

    ``format`` is ``"onnx"`` (any batch size; compared with PyTorch if ONNX Runtime is installed),
    ``"dense"`` (a state_dict as plain safetensors) or ``"torch-csr"`` (see `to_csr`); without it
    the suffix of ``out`` decides. For ONNX the network is built as by `probmask.load`, with the
    same ``model``; ``input_shape`` is that of one example, and is needed if the file does not say.
    An existing file is refused unless ``overwrite``, the artifact itself always.
    """
    artifact, out = Path(artifact), Path(out)
    kind = _format(out, format)
    _check_place(artifact, out, overwrite=overwrite)
    agreement = None
    content: Content
    if kind == "onnx":
        content, agreement = _onnx(artifact, model, input_shape)
    elif kind == "dense":
        content = to_safetensors(load_state(artifact))
    else:
        content = _csr_writer(load_state(artifact))
    write_atomically(out, content, overwrite=overwrite)
    return Exported(out, kind, out.stat().st_size, agreement)


def to_safetensors(state: Mapping[str, Tensor]) -> bytes:
    """Return a state_dict as a plain safetensors file, with every name in it.

    Tied weights are written once for each of their names, so that any reader's `load_state_dict`
    finds them all.
    """
    separate = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    return safetensors_bytes(separate, metadata={"format": "pt"})


def to_csr(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a state_dict whose sparse weights are ``torch.sparse_csr``, and their shapes.

    ``{"state_dict": …, "shapes": …}``. A real tensor of two or more dimensions of which at least
    half is zero becomes a matrix of ``shape[0]`` rows, one for each output of a layer, the other
    dimensions flattened into its columns in order; ``shapes`` holds the shape it had. Everything
    else is in ``state_dict`` as it was. ``matrix.to_dense().reshape(shapes[name])`` gives a weight
    back; names that share a tensor share its matrix.
    """
    made: dict[int, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    converted: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if id(tensor) not in made:
            made[id(tensor)] = _matrix(tensor) if _is_sparse(tensor) else tensor
        converted[name] = made[id(tensor)]
        if converted[name] is not tensor:
            shapes[name] = list(tensor.shape)
    return {"state_dict": converted, "shapes": shapes}


def _is_sparse(tensor: Tensor) -> bool:
    real = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # fp8 has no sparse layout
    return real and tensor.dim() > 1 and 2 * int(tensor.count_nonzero()) <= tensor.numel() > 0


def _matrix(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta", UserWarning)
        return tensor.detach().flatten(1).to_sparse_csr()


def _csr_writer(state: Mapping[str, Tensor]) -> Callable[[Any], object]:
    return lambda file: torch.save(to_csr(state), file)


def _onnx(
    artifact: Path, model: str | None, input_shape: Sequence[int] | None
) -> tuple[bytes, Agreement | None]:
    info = read(artifact)
    shape = input_shape_of(artifact, info, model, input_shape)
    network = load(artifact, model=model)
    data = to_onnx(network, shape, metadata=info.metadata)
    if find_spec("onnxruntime") is None:
        return data, None
    agreement = compare_with_onnxruntime(data, network, shape)
    allowed = _TOLERANCE * max(1.0, agreement.largest_output)
    if not agreement.largest_difference <= allowed:  # also if it is not a number
        raise InputError(
            f"export({artifact}): ONNX Runtime gives other outputs than PyTorch, by "
            f"{agreement.largest_difference:.2g} on random inputs; nothing was written. A network "
            "that draws random numbers in evaluation, or gives infinities, cannot be exported."
        )
    return data, agreement


def input_shape_of(
    artifact: Path, info: ArtifactInfo, model: str | None, given: Sequence[int] | None
) -> tuple[int, ...]:
    """The shape of one example: as given, as recorded, or as the network is usually used."""
    recorded = info.metadata.get("image_shape")
    if given is not None:
        shape = tuple(given)
    elif isinstance(recorded, list):
        shape = tuple(recorded)
    else:
        name, settings = model or info.metadata.get("model"), info.metadata.get("model_args")
        if not isinstance(name, str) or name not in MODELS:
            raise ArtifactError(
                f"{artifact}: does not say which inputs its network takes; pass the shape of one "
                "of them: input_shape=(3, 32, 32) (--input-shape 3,32,32)."
            )
        channels, *sides = MODELS[name].image_shape
        known = settings if isinstance(settings, dict) else {}
        shape = (known.get("channels", channels), *sides)
    if not shape or any(type(side) is not int or side < 1 for side in shape):
        raise InputError(f"export(input_shape={shape}): the sizes of one example, all at least 1.")
    if math.prod(shape) > _LARGEST_EXAMPLE:
        raise InputError(
            f"export(input_shape={shape}): more than {_LARGEST_EXAMPLE:,} numbers for one example; "
            "give a smaller one."
        )
    return shape


def _format(out: Path, given: str | None) -> str:
    if given is not None:
        check_choice("export", "format", given, tuple(FORMATS))
        return given
    for name, suffix in FORMATS.items():
        if out.suffix == suffix:
            return name
    known = ", ".join(f"{suffix} ({name})" for name, suffix in FORMATS.items())
    raise InputError(f"export({out}): which format? Pass --format, or use a suffix: {known}.")


def _check_place(artifact: Path, out: Path, *, overwrite: bool) -> None:
    """Refuse before the work what `write_atomically` would refuse after it."""
    if out.is_dir():
        raise InputError(f"{out}: is a directory; give the path of a file.")
    if not out.exists():
        return
    if artifact.exists() and out.samefile(artifact):
        raise InputError(f"{out}: is the artifact itself; choose another file to export to.")
    if not overwrite:
        raise InputError(f"{out}: the file exists; pass --force (overwrite=True) to replace it.")
