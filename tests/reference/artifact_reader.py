"""A reader of artifacts written from docs/format.md alone: plain, slow, no numpy, no torch."""

import json
import math
import struct
import zlib
from io import BytesIO
from itertools import accumulate, pairwise

WIDTH = {"F64": 8, "C64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
WIDTH |= {"I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}


def read_artifact(path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict]:
    """Return name -> (dtype, shape, dense bytes) and the metadata."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert header.pop("__metadata__")["probmask"] == "1"
    stored = {k: raw[start:][slice(*tensor["data_offsets"])] for k, tensor in header.items()}
    table = json.loads(zlib.decompress(stored.pop("probmask:table")))
    assert {name: zlib.crc32(content) for name, content in stored.items()} == table["crc32"]
    streams = {name: BytesIO(content) for name, content in stored.items()}
    tensors = {e["name"]: (e["dtype"], e["shape"], decode(e, streams)) for e in table["tensors"]}
    assert not any(stream.read() for stream in streams.values())
    return tensors | {a: tensors[name] for a, name in table["aliases"].items()}, table["metadata"]


def decode(entry: dict, streams: dict) -> bytes:
    def take(part: str, dtype: str, count: int) -> bytes:
        return streams[part if part in streams else f"probmask:{dtype}"].read(count * WIDTH[dtype])

    name, nnz, n, width = (
        entry["name"],
        entry["nnz"],
        math.prod(entry["shape"]),
        WIDTH[entry["dtype"]],
    )
    held, indices = entry.get("values", entry["dtype"]), range(n)
    if entry["encoding"] == "dense":
        values = take(name, held, n)
    else:
        values = take(f"{name}.values", held, nnz)
        gaps = GAPS[entry["encoding"]](take(f"{name}.positions", "U8", entry["positions"]), nnz)
        indices = [gap + k for k, gap in enumerate(accumulate(gaps))]
    if held != entry["dtype"]:  # F16, for F32 or F64
        to = "<f" if width == 4 else "<d"
        values = b"".join(struct.pack(to, *x) for x in struct.iter_unpack("<e", values))
    dense = [bytes(width)] * n
    for k, i in enumerate(indices):
        dense[i] = values[k * width : (k + 1) * width]
    return b"".join(dense)


def from_bits(stream: bytes, _nnz: int) -> list[int]:
    places = [i for i in range(8 * len(stream)) if stream[i // 8] >> i % 8 & 1]
    return [b - a - 1 for a, b in pairwise([-1, *places])]


def from_delta(stream: bytes, _nnz: int) -> list[int]:
    ends = [0, *(at + 1 for at, byte in enumerate(stream) if byte < 255)]
    return [sum(stream[a:b]) for a, b in pairwise(ends)]


def from_rice(stream: bytes, nnz: int) -> list[int]:
    k, split = stream[0], 1 + math.ceil(nnz * stream[0] / 8)
    bit = [stream[1 + i // 8] >> i % 8 & 1 for i in range(nnz * k)]
    low = [sum(bit[j * nnz + i] << j for j in range(k)) for i in range(nnz)]
    return [(high << k) + low[i] for i, high in enumerate(from_bits(stream[split:], nnz))]


GAPS = {"bitmap": from_bits, "delta": from_delta, "rice": from_rice}
