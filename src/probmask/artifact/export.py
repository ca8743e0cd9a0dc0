"""Exporting an artifact: ONNX, a dense state_dict, sparse CSR tensors, an artifact with a graph."""

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
from torch import Tensor, nn

from probmask.artifact.load import load, load_state
from probmask.artifact.onnx import Agreement, compare_with_onnxruntime, random_inputs, to_onnx
from probmask.artifact.save import save
from probmask.checks import check_choice
from probmask.errors import ArtifactError, InputError
from probmask.files import Content, write_atomically
from probmask.models import MODELS
from probmask.storage.reader import ArtifactInfo, read

PathLike = str | os.PathLike[str]

# The formats and their file suffixes.
FORMATS = {"onnx": ".onnx", "dense": ".safetensors", "torch-csr": ".pt", "graph": ""}
# The largest accepted difference between ONNX Runtime and PyTorch, relative to the largest output.
_TOLERANCE = 1e-3
# The largest number of values in one input. A file can name any shape; no real image is larger.
_MAX_INPUT_SIZE = 2**26


@dataclass(frozen=True)
class Exported:
    """The file that `export` wrote.

    `agreement` compares ONNX Runtime with PyTorch. It is None for other formats, and if ONNX
    Runtime is not installed.
    """

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
    """Write the network of an artifact to a file in a format that other tools read.

    For ONNX the network is built as by `probmask.load`. The file takes any batch size. If ONNX
    Runtime is installed, its outputs are compared with those of PyTorch before the file is written.

    Args:
        artifact: The artifact.
        out: The file to write.
        format: ``"onnx"``, ``"dense"`` (the state_dict as plain safetensors), ``"torch-csr"`` (see
            `to_csr`) or ``"graph"`` (an artifact that `probmask.runtime.load` runs without
            PyTorch). Default: chosen by the suffix of ``out``, ``.onnx``, ``.safetensors`` (dense)
            or ``.pt``.
        model: The name of the network, as for `probmask.load`. Only for ONNX and graphs.
        input_shape: The shape of one input without the batch dimension, such as ``(3, 32, 32)``, or
            the number of tokens. Only for ONNX and graphs. Default: the shape in the artifact's
            metadata, or the usual one of the network.
        overwrite: Replace an existing file. The artifact itself is never replaced.

    Returns:
        The path, the format and the size of the new file, and how well ONNX Runtime and PyTorch
        agree.

    Raises:
        ArtifactError: The artifact is not intact, or does not name its network or its input shape.
        InputError: An argument is invalid, the file exists and ``overwrite`` is False, or the
            network cannot be exported.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> from probmask.artifact import export
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(torch.nn.Linear(4, 2), f"{folder}/model.safetensors")
        ...     exported = export(f"{folder}/model.safetensors", f"{folder}/model.pt")
        >>> exported.format
        'torch-csr'
    """
    artifact, out = Path(artifact), Path(out)
    kind = _format(out, format)
    _check_target(artifact, out, overwrite=overwrite)
    if kind == "graph":
        _save_with_graph(artifact, out, model, input_shape, overwrite=overwrite)
        return Exported(out, kind, out.stat().st_size, None)
    agreement = None
    content: Content
    if kind == "onnx":
        content, agreement = _onnx(artifact, model, input_shape)
    elif kind == "dense":
        content = _to_safetensors(load_state(artifact))
    else:
        content = _csr_writer(load_state(artifact))
    write_atomically(out, content, overwrite=overwrite)
    return Exported(out, kind, out.stat().st_size, agreement)


def _save_with_graph(
    artifact: Path,
    out: Path,
    model: str | None,
    input_shape: Sequence[int] | None,
    *,
    overwrite: bool,
) -> None:
    info = read(artifact)
    shape = input_shape_of(artifact, info, model, input_shape)
    network = load(artifact, model=model)
    save(
        network,
        out,
        metadata=info.metadata,
        values=None if info.rounding is None else info.rounding["values"],
        graph=True,
        example=example_of(model or info.metadata.get("model"), network, shape, 1),
        overwrite=overwrite,
    )


def example_of(name: object, network: nn.Module, shape: Sequence[int], batch: int) -> Any:
    """Return inputs of a network: noise, or tokens and their mask for a network of sentences."""
    takes_tokens = isinstance(name, str) and name in MODELS and MODELS[name].image_shape is None
    tokens = torch.ones(batch, *shape, dtype=torch.int64)
    return (tokens, tokens) if takes_tokens else random_inputs(network, shape, batch)


def _to_safetensors(state: Mapping[str, Tensor]) -> bytes:
    """Return a state_dict as a plain safetensors file.

    Tied weights are written once for each of their names, so that `load_state_dict` finds them all.
    """
    separate = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    return safetensors_bytes(separate, metadata={"format": "pt"})


def to_csr(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert the sparse weights of a state_dict to ``torch.sparse_csr`` matrices.

    A floating-point tensor of two or more dimensions with at least half of its entries zero becomes
    a matrix with ``shape[0]`` rows. Its other dimensions are flattened, in order, into the columns.
    All other tensors stay as they are. ``matrix.to_dense().reshape(shapes[name])`` restores a
    weight.

    Args:
        state: A state_dict of dense tensors, such as `load_state` returns.

    Returns:
        A dictionary with two tables: ``"state_dict"`` contains every tensor, and ``"shapes"`` the
        original shape of each matrix. Names that share a tensor share its matrix.

    Example:
        >>> import torch
        >>> from probmask.artifact import to_csr
        >>> saved = to_csr({"weight": torch.eye(4).reshape(4, 2, 2), "bias": torch.ones(4)})
        >>> saved["shapes"], saved["state_dict"]["weight"].layout
        ({'weight': [4, 2, 2]}, torch.sparse_csr)
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
    if not agreement.largest_difference <= allowed:  # written so that NaN also raises
        raise InputError(
            f"export({artifact}): the outputs of ONNX Runtime and PyTorch differ by "
            f"{agreement.largest_difference:.2g} on random inputs; no file was written. A network "
            "that draws random numbers in evaluation, or returns infinities, cannot be exported."
        )
    return data, agreement


def input_shape_of(
    artifact: Path, info: ArtifactInfo, model: str | None, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the shape of one input: the given one, the recorded one, or the network's usual one.

    Raise `ArtifactError` if none is known, and `InputError` if it is not a valid shape.
    """
    recorded = info.metadata.get("image_shape")
    if given is not None:
        shape = tuple(given)
    elif isinstance(recorded, list):
        shape = tuple(recorded)
    else:
        shape = _usual_shape(artifact, info, model)
    if not shape or any(type(side) is not int or side < 1 for side in shape):
        raise InputError(
            f"export(input_shape={shape}): expected the sizes of one input, each at least 1."
        )
    if math.prod(shape) > _MAX_INPUT_SIZE:
        raise InputError(
            f"export(input_shape={shape}): one input may have at most {_MAX_INPUT_SIZE:,} values; "
            "pass a smaller shape."
        )
    return shape


def _usual_shape(artifact: Path, info: ArtifactInfo, model: str | None) -> tuple[int, ...]:
    """Return the image shape that a network of this package is usually used with."""
    name, settings = model or info.metadata.get("model"), info.metadata.get("model_args")
    if not isinstance(name, str) or name not in MODELS:
        raise ArtifactError(
            f"{artifact}: does not record the input shape of its network; pass the shape of one "
            "input: input_shape=(3, 32, 32) (--input-shape 3,32,32)."
        )
    usual = MODELS[name].image_shape
    if usual is None:
        raise ArtifactError(
            f"{artifact}: {name} takes tokens; only networks that take one tensor of numbers, such "
            "as images, can be exported to ONNX or timed. Load it with probmask.load. For --format "
            "graph or c, pass the number of tokens: input_shape=(128,) (--input-shape 128)."
        )
    channels, *sides = usual
    known = settings if isinstance(settings, dict) else {}
    return (known.get("channels", channels), *sides)


def _format(out: Path, given: str | None) -> str:
    if given is not None:
        check_choice("export", "format", given, tuple(FORMATS))
        return given
    suffixes = {name: suffix for name, suffix in FORMATS.items() if suffix}
    for name, suffix in suffixes.items():
        if out.suffix == suffix:
            return name
    known = ", ".join(f"{suffix} ({name})" for name, suffix in suffixes.items())
    raise InputError(
        f"export({out}): the suffix does not name a format; pass format= (--format), or use a "
        f"suffix of {known}."
    )


def _check_target(artifact: Path, out: Path, *, overwrite: bool) -> None:
    """Raise before the export for a target that `write_atomically` would reject after it."""
    if out.is_dir():
        raise InputError(f"{out}: is a directory; pass the path of a file.")
    if not out.exists():
        return
    if artifact.exists() and out.samefile(artifact):
        raise InputError(f"{out}: is the artifact itself; choose another file to export to.")
    if not overwrite:
        raise InputError(f"{out}: the file exists; pass --force (overwrite=True) to replace it.")
