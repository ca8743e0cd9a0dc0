"""What an artifact contains, layer by layer: weights kept, encoding and bytes."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from probmask.messages import printable
from probmask.storage.reader import ArtifactInfo, TensorInfo, read


@dataclass(frozen=True)
class StoredLayer:
    """The weights of one layer in an artifact.

    `macs` and `dense_macs` are the multiply-accumulates for one input with the kept weights and
    with all weights. Both are None if the artifact's metadata has no `macs_per_weight` for it.
    `encoding` is that of the positions of the kept weights. `values` is the dtype in which these
    are stored, or ``"int8"`` to ``"int2"``. `bytes` is the size of both.
    """

    name: str
    shape: tuple[int, ...]
    kept: int
    size: int
    macs: int | None
    dense_macs: int | None
    encoding: str
    bytes: int
    values: str

    @property
    def sparsity(self) -> float:
        """The fraction of its weights that are pruned."""
        return 1 - self.kept / self.size if self.size else 0.0

    @property
    def bits_per_weight(self) -> float:
        """The number of bits stored for each kept weight, or 0 if there is none."""
        return 8 * self.bytes / self.kept if self.kept else 0.0


@dataclass(frozen=True)
class ArtifactSummary:
    """The layers of an artifact, their totals, and the size of the file.

    `str()` gives a table, in which "bits" are those per kept weight. `layers` contains the tensors
    of two or more dimensions and those with recorded MACs; `other_bytes` is the size of the
    remaining tensors, such as biases. `dense_bytes` is the size of all tensors stored dense.
    `metadata` and `rounding` are those of `probmask.read`.
    """

    layers: tuple[StoredLayer, ...]
    other_bytes: int
    file_bytes: int
    dense_bytes: int
    metadata: dict[str, Any]
    rounding: dict[str, Any] | None

    @property
    def total(self) -> StoredLayer:
        """The totals of all layers."""
        return _total("all", self.layers)

    @property
    def pruned(self) -> StoredLayer:
        """The totals of the layers that contain zeros."""
        return _total("layers with zeros", [each for each in self.layers if each.kept < each.size])

    @property
    def kept(self) -> int:
        """The number of weights kept in all layers."""
        return self.total.kept

    @property
    def size(self) -> int:
        """The number of weights in all layers."""
        return self.total.size

    @property
    def sparsity(self) -> float:
        """The fraction of the weights of all layers that are pruned."""
        return self.total.sparsity

    @property
    def macs(self) -> int | None:
        """The multiply-accumulates of all layers, or None if those of a layer are unknown."""
        return self.total.macs

    @property
    def layer_bytes(self) -> int:
        """The number of bytes stored for the layers."""
        return self.total.bytes

    @property
    def totals(self) -> tuple[StoredLayer, ...]:
        """`total`, preceded by `pruned` if only some of the layers contain zeros."""
        some = 0 < self.pruned.size < self.size
        return (self.pruned, self.total) if some else (self.total,)

    @property
    def header_bytes(self) -> int:
        """The number of bytes of the file that are not tensor data: the header and the table."""
        return self.file_bytes - self.layer_bytes - self.other_bytes

    def __str__(self) -> str:
        rows = [
            ("layer", "shape", "kept", "size", "sparsity", "encoding", "values", "bytes", "bits")
        ]
        for layer in (*self.layers, *self.totals):
            shape = "×".join(map(str, layer.shape))
            counts = f"{layer.kept:,}", f"{layer.size:,}", f"{100 * layer.sparsity:.2f} %"
            sizes = f"{layer.bytes:,}", f"{layer.bits_per_weight:.1f}"
            rows.append(
                (printable(layer.name), shape, *counts, layer.encoding, layer.values, *sizes)
            )
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
        The layers, each with ``name``, ``shape``, ``kept``, ``size``, ``sparsity``, ``encoding``,
        ``values``, ``bytes`` and ``bits_per_weight``; their totals; the size of the file; its
        metadata. ``print`` shows a table.

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
        values=row.values,
    )


def _macs_per_weight(info: ArtifactInfo) -> dict[str, int]:
    """Return the metadata's `macs_per_weight`. Anyone can write metadata, so only counts pass."""
    recorded = info.metadata.get("macs_per_weight")
    items = recorded.items() if isinstance(recorded, Mapping) else ()
    return {name: macs for name, macs in items if isinstance(macs, int) and 0 <= macs < 2**63}


def _total(name: str, layers: Sequence[StoredLayer]) -> StoredLayer:
    macs = [layer.macs for layer in layers if layer.macs is not None]
    dense_macs = [layer.dense_macs for layer in layers if layer.dense_macs is not None]
    known = len(macs) == len(layers)
    return StoredLayer(
        name=name,
        shape=(),
        kept=sum(layer.kept for layer in layers),
        size=sum(layer.size for layer in layers),
        macs=sum(macs) if known else None,
        dense_macs=sum(dense_macs) if known else None,
        encoding="",
        bytes=sum(layer.bytes for layer in layers),
        values="",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows as lines: text columns aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = (0, 1, 5, 6)
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
