"""A plain, slow reader of artifacts, written from docs/format.md alone, without NumPy and torch."""

import json
import math
import struct
import zlib
from io import BytesIO
from itertools import accumulate

WIDTH = {"F64": 8, "C64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}
WIDTH |= {"I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}


def read_artifact(path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict]:
    """Return name -> (dtype, shape, dense bytes) and the metadata."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert header.pop("__metadata__")["probmask"] in ("1", "2")
    streams = {k: BytesIO(raw[start:][slice(*v["data_offsets"])]) for k, v in header.items()}
    table = json.loads(zlib.decompress(streams.pop("probmask:table").read()))
    assert {name: zlib.crc32(s.getvalue()) for name, s in streams.items()} == table["crc32"]
    tensors = {e["name"]: (e["dtype"], e["shape"], decode(e, streams)) for e in table["tensors"]}
    assert not any(stream.read() for stream in streams.values())
    return tensors | {a: tensors[name] for a, name in table["aliases"].items()}, table["metadata"]


def decode(entry: dict, streams: dict) -> bytes:
    def take(part: str, dtype: str, count: int) -> bytes:
        return streams[part if part in streams else f"probmask:{dtype}"].read(count * WIDTH[dtype])

    name, dtype, n, nnz = entry["name"], entry["dtype"], math.prod(entry["shape"]), entry["nnz"]
    held, width, find = entry.get("values", dtype), WIDTH[dtype], PLACES.get(entry["encoding"])
    to = "<f" if width == 4 else "<d"
    if held.startswith("int"):
        values = take(f"{name}.values", "U8", entry["coded"])
    else:
        values = take(f"{name}.values", held, nnz) if find else take(name, held, n)
    places = find(take(f"{name}.positions", "U8", entry["positions"]), nnz) if find else range(n)
    if held.startswith("int"):
        channels = [place // (n // entry["shape"][0]) for place in places]
        numbers = from_integers(values, channels, int(held[3:]))
        values = b"".join(struct.pack(to, number) for number in numbers)
    elif held != dtype:  # F16, for F32 or F64
        values = b"".join(struct.pack(to, *x) for x in struct.iter_unpack("<e", values))
    at = {place: k * width for k, place in enumerate(places)}
    return b"".join(values[at[i] : at[i] + width] if i in at else bytes(width) for i in range(n))


def from_integers(stream: bytes, channels: list[int], bits: int) -> list[float]:
    source = BytesIO(stream)
    base = int.from_bytes(source.read(2), "little", signed=True)
    used = sorted(set(channels))
    codes = dict(zip(used, from_block(source, len(used)), strict=True))
    negative = set(from_bits(source.read(math.ceil(len(channels) / 8)), 0))
    sizes = [symbol + 1 for symbol in from_block(source, len(channels))]
    assert source.read() == b""
    assert max(sizes) < 2 ** (bits - 1)
    scales = {c: math.ldexp(4 + (base + d) % 4, (base + d) // 4) for c, d in codes.items()}
    signs = [-1 if i in negative else 1 for i in range(len(channels))]
    return [s * q * scales[c] for s, q, c in zip(signs, sizes, channels, strict=True)]


def from_block(source: BytesIO, count: int) -> list[int]:
    r, last = source.read(2)
    assert (last + 1) << r <= 256
    frequencies = [from_number(source) for _ in range(last + 1)] if last else []
    planes = set(from_bits(source.read(math.ceil(count * r / 8)), 0))
    low = [sum(1 << j for j in range(r) if j * count + i in planes) for i in range(count)]
    high = from_rans(source, frequencies, count) if last else [0] * count
    return [(h << r) + part for h, part in zip(high, low, strict=True)]


def from_rans(source: BytesIO, frequencies: list[int], count: int) -> list[int]:
    lanes = 1 << source.read(1)[0]
    states = [int.from_bytes(source.read(4), "little") for _ in range(lanes)]
    words = [int.from_bytes(source.read(2), "little") for _ in range(from_number(source))]
    starts = [sum(frequencies[:s]) for s in range(len(frequencies))]
    assert sum(frequencies) == 4096
    found = []
    for i in range(count):
        x = states[i % lanes]
        slot = x % 4096
        (s,) = (s for s, f in enumerate(frequencies) if starts[s] <= slot < starts[s] + f)
        x = frequencies[s] * (x // 4096) + slot - starts[s]
        states[i % lanes] = x if x >= 2**16 else (x << 16) + words.pop(0)
        found.append(s)
    assert states == [2**16] * lanes
    assert words == []
    return found


def from_number(source: BytesIO) -> int:
    byte = source.read(1)[0]
    return byte if byte < 128 else byte - 128 + (from_number(source) << 7)


def from_bits(stream: bytes, _nnz: int) -> list[int]:
    return [i for i in range(8 * len(stream)) if stream[i // 8] >> i % 8 & 1]


def from_rice(stream: bytes, nnz: int) -> list[int]:
    k, split = stream[0], 1 + math.ceil(nnz * stream[0] / 8)
    bit = [stream[1 + i // 8] >> i % 8 & 1 for i in range(nnz * k)]
    low = accumulate(sum(bit[j * nnz + i] << j for j in range(k)) for i in range(nnz))
    return [((j - i) << k) + i + next(low) for i, j in enumerate(from_bits(stream[split:], nnz))]


def from_delta(stream: bytes, _nnz: int) -> list[int]:
    ends = accumulate(byte + (byte < 255) for byte in stream)
    return [end - 1 for byte, end in zip(stream, ends, strict=True) if byte < 255]


PLACES = {"bitmap": from_bits, "delta": from_delta, "rice": from_rice}
