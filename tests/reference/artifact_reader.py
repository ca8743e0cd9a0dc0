"""A reader of artifacts written from docs/format.md alone: plain, slow, no numpy, no torch."""

import json
import math
import struct
import zlib
from pathlib import Path

WIDTH = {"F64": 8, "C64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
WIDTH |= {"I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}


def read_artifact(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict]:
    """Return name -> (dtype, shape, dense bytes) and the metadata."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    outer = header.pop("__metadata__")
    assert f"{zlib.crc32(outer['probmask'].encode()):08x}" == outer["probmask_crc32"]
    ours = json.loads(outer["probmask"])
    assert ours["format"] == 1

    def stored(name: str) -> bytes:
        begin, end = header[name]["data_offsets"]
        assert end - begin == math.prod(header[name]["shape"]) * WIDTH[header[name]["dtype"]]
        return data[begin:end]

    tensors = {}
    for name, entry in ours["tensors"].items():
        if entry["encoding"] == "dense":
            dense = stored(name)
            assert zlib.crc32(dense) == entry["crc32"]
        else:
            values, positions = stored(f"{name}.values"), stored(f"{name}.positions")
            assert zlib.crc32(values + positions) == entry["crc32"]
            width, n = WIDTH[entry["dtype"]], math.prod(entry["shape"])
            indices = {"bitmap": from_bitmap, "delta": from_delta}[entry["encoding"]](positions, n)
            assert len(indices) == entry["nnz"]
            dense = bytearray(n * width)
            for k, i in enumerate(indices):
                dense[i * width : (i + 1) * width] = values[k * width : (k + 1) * width]
        tensors[name] = (entry["dtype"], entry["shape"], bytes(dense))
    aliases = {alias: tensors[name] for alias, name in ours["aliases"].items()}
    return tensors | aliases, ours["metadata"]


def from_bitmap(positions: bytes, n: int) -> list[int]:
    return [i for i in range(n) if positions[i // 8] >> (i % 8) & 1]


def from_delta(positions: bytes, n: int) -> list[int]:
    indices, at = [], 0
    for byte in positions:
        at += byte
        if byte < 255:
            indices.append(at)
            at += 1
    assert indices[-1] == n  # the last gap ends the tensor
    return indices[:-1]
