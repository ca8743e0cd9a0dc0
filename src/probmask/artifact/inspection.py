"""What an artifact contains, layer by layer: weights kept, encoding and bytes."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probmask.artifact.reader import ArtifactInfo, TensorInfo, read
from probmask.messages import printable


@dataclass(frozen=True)
class StoredLayer:
    """The weights of one layer in an artifact.

    `macs` and `dense_macs` are the multiply-accumulates for one input with the kept weights and
    with all weights. Both are None if the artifact's metadata has no `macs_per_weight` for it.
    """

    name: str
    shape: tuple[int, ...]
    kept: int
    size: int
    macs: int | None
    dense_macs: int | None
    encoding: str
    bytes: int

    @property
    def sparsity(self) -> float:
        """The fraction of its weights that are pruned."""
        return 1 - self.kept / self.size if self.size else 0.0


@dataclass(frozen=True)
class ArtifactSummary:
    """The layers of an artifact, their totals, and the size of the file.

    `str()` gives a table. `layers` contains the tensors of two or more dimensions and those with
    recorded MACs; `other_bytes` is the size of the remaining tensors, such as biases. `dense_bytes`
    is the size of all tensors stored dense. `metadata` and `rounding` are those of `probmask.read`.
    """

    layers: tuple[StoredLayer, ...]
    other_bytes: int
    file_bytes: int
    dense_bytes: int
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None

    @property
    def kept(self) -> int:
        """The number of weights kept in all layers."""
        return sum(layer.kept for layer in self.layers)

    @property
    def size(self) -> int:
        """The number of weights in all layers."""
        return sum(layer.size for layer in self.layers)

    @property
    def sparsity(self) -> float:
        """The fraction of the weights of all layers that are pruned."""
        return 1 - self.kept / self.size if self.size else 0.0

    @property
    def macs(self) -> int | None:
        """The multiply-accumulates of all layers, or None if those of a layer are unknown."""
        known = [layer.macs for layer in self.layers if layer.macs is not None]
        return sum(known) if len(known) == len(self.layers) else None

    @property
    def layer_bytes(self) -> int:
        """The number of bytes stored for the layers."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def header_bytes(self) -> int:
        """The number of bytes of the file that are not tensor data: the header and the table."""
        return self.file_bytes - self.layer_bytes - self.other_bytes

    def __str__(self) -> str:
        rows = [("layer", "shape", "kept", "size", "sparsity", "encoding", "bytes")]
        for layer in self.layers:
            shape = "×".join(map(str, layer.shape))
            rows.append(
                (printable(layer.name), shape, *_counts(layer), layer.encoding, f"{layer.bytes:,}")
            )
        rows.append(("all", "", *_counts(self), "", f"{self.layer_bytes:,}"))
        return (
            f"{_aligned(rows)}\n"
            f"file: {self.file_bytes:,} bytes, "
            f"{100 * self.file_bytes / max(1, self.dense_bytes):.1f} % "
            f"of the {self.dense_bytes:,} bytes of its tensors stored dense"
        )


def inspect(path: str | os.PathLike[str]) -> ArtifactSummary:
    """Return what an artifact contains, layer by layer, without reading its tensors.

    This is what the command ``probmask inspect`` prints. `probmask.read` returns the header of
    the file as it is, with every tensor.

    Args:
        path: The artifact, a file that `probmask.save` or ``probmask train`` wrote.

    Returns:
        The layers, each with ``name``, ``shape``, ``kept``, ``size``, ``sparsity``, ``encoding``
        and ``bytes``; their totals; the size of the file; its metadata. ``print`` shows a table.

    Raises:
        ArtifactError: The file does not exist or is not an intact artifact.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import torch, probmask
        >>> model = torch.nn.Linear(100, 10)
        >>> with torch.no_grad():
        ...     model.weight[:, 2:] = 0.0
        >>> with TemporaryDirectory() as folder:
        ...     info = probmask.save(model, f"{folder}/model.safetensors")
        ...     summary = probmask.inspect(f"{folder}/model.safetensors")
        >>> summary.kept, summary.size, summary.sparsity
        (20, 1000, 0.98)
        >>> [(layer.name, layer.encoding, layer.bytes) for layer in summary.layers]
        [('weight', 'delta', 100)]
    """
    info = read(path)
    macs_per_weight = _macs_per_weight(info)
    layers = tuple(
        _layer(row, macs_per_weight.get(row.name))
        for row in info.tensors
        if row.name in macs_per_weight or len(row.shape) >= 2
    )
    stored = sum(row.stored_bytes for row in info.tensors)
    return ArtifactSummary(
        layers=layers,
        other_bytes=stored - sum(layer.bytes for layer in layers),
        file_bytes=info.file_bytes,
        dense_bytes=info.dense_bytes,
        metadata=info.metadata,
        rounding=info.rounding,
    )


def _layer(row: TensorInfo, macs_per_weight: int | None) -> StoredLayer:
    size = math.prod(row.shape)
    return StoredLayer(
        name=row.name,
        shape=row.shape,
        kept=row.nnz,
        size=size,
        macs=None if macs_per_weight is None else macs_per_weight * row.nnz,
        dense_macs=None if macs_per_weight is None else macs_per_weight * size,
        encoding=row.encoding,
        bytes=row.stored_bytes,
    )


def _macs_per_weight(info: ArtifactInfo) -> dict[str, int]:
    """Return the metadata's `macs_per_weight`. Anyone can write metadata, so only counts pass."""
    recorded = info.metadata.get("macs_per_weight")
    items = recorded.items() if isinstance(recorded, Mapping) else ()
    return {name: macs for name, macs in items if isinstance(macs, int) and 0 <= macs < 2**63}


def _counts(weights: StoredLayer | ArtifactSummary) -> tuple[str, str, str]:
    return f"{weights.kept:,}", f"{weights.size:,}", f"{100 * weights.sparsity:.2f} %"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as lines: text columns aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = (0, 1, 5)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
