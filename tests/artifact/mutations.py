"""Mutations of artifacts: random damage, and forgeries with correct checksums."""

import json
import random
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fuzzing import Mutation, anything, cut, edited, flip_bits, move_blocks, near, splice

N = 1000  # entries of the small tensors, which are packed
LARGE = 12_000  # entries of the tensors that are stored under their own names
# Values and names that mean something in the table and the header of an artifact.
WORDS = (
    *("dense", "bitmap", "delta", "rice"),
    *("F64", "F32", "F16", "BF16", "U8", "I8", "BOOL", "int8", "int2"),
    *("probmask:U8", "probmask:F32", "probmask:table"),
    *("large_dense", "rice", "rice.values", "large_rice.values", "large_weight.values"),
    [2**31, 2**31],
    [1] * 65,
)


def sample_model() -> nn.Module:
    """Return a model with every encoding, packed and unpacked, tied weights and several dtypes."""
    generator = torch.Generator().manual_seed(0)
    bag = nn.Module()

    def sparse(n: int, density: float) -> torch.Tensor:
        numbers, kept = torch.randn(n, generator=generator), torch.rand(n, generator=generator)
        return torch.where(kept < density, numbers, 0.0)

    for name, n in (("", N), ("large_", LARGE)):
        bag.register_buffer(f"{name}bitmap", sparse(n, 0.5))
        bag.register_buffer(f"{name}rice", sparse(n, 0.15))
        bag.register_buffer(f"{name}dense", torch.randn(n, generator=generator))
    bag.register_buffer("delta", torch.zeros(N).index_fill_(0, torch.tensor([254, 509]), 1.0))
    bag.register_buffer("narrow", sparse(N, 0.1).half())
    bag.register_buffer("weight", sparse(N, 0.1).reshape(20, 50))  # two dimensions: rounded
    bag.register_buffer("large_weight", sparse(LARGE, 0.6).reshape(100, 120))
    bag.register_buffer("filled", torch.randn(8, 9, generator=generator))
    bag.register_buffer("flags", torch.tensor([True, False]))
    bag.register_buffer("steps", torch.tensor(3))
    bag.register_buffer("tied", bag.dense)
    return bag


class GraphSample(nn.Module):
    """A small network whose graph has most kinds of nodes: images, then tokens, then a view."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.embedding = nn.Embedding(10, 8)
        self.heads, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)
        self.classifier = nn.Linear(8, 5)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data.masked_fill_(torch.rand_like(parameter) < 0.7, 0.0)

    def forward(self, images: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.features(images)
        x = torch.cat([x, x * x], 1)[:, :8].flatten(2).transpose(1, 2)
        x = torch.cat([self.embedding(ids), x], 1)
        heads = self.heads(x).unflatten(2, (3, 2, 4)).transpose(1, 3).unbind(2)
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        x = self.norm(x + mixed.transpose(1, 2).flatten(2))
        logits = self.classifier(nn.functional.gelu(x[:, 0]))
        return {"logits": logits, "states": x.transpose(0, 1)}

    @staticmethod
    def inputs(images: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs of the network."""
        generator = torch.Generator().manual_seed(images)
        ids = torch.randint(0, 10, (images, 3), generator=generator)
        return torch.randn(images, 3, 8, 8, generator=generator), ids


@dataclass
class Pieces:
    """The parts of a file, which can be changed."""

    header: dict[str, Any]  # of the container, without the table and the metadata
    blobs: dict[str, bytearray]  # the bytes of each stored tensor
    table: Any
    format: str

    def entry(self, name: str) -> dict[str, Any]:
        """Return the entry of a tensor in the table."""
        return next(entry for entry in self.table["tensors"] if entry["name"] == name)

    def positions(self, name: str) -> tuple[int, int]:
        """Return where the positions of a tensor begin and end in the pack of positions."""
        entries = [entry for entry in self.table["tensors"] if "positions" in entry]
        before = entries[: [entry["name"] for entry in entries].index(name)]
        begin = sum(entry["positions"] for entry in before)
        return begin, begin + self.entry(name)["positions"]


def unpack(content: bytes) -> Pieces:
    """Split an intact file into its parts."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    version = header.pop("__metadata__")["probmask"]
    data = content[start:]
    blobs = {key: bytearray(data[slice(*v["data_offsets"])]) for key, v in header.items()}
    del header["probmask:table"]
    table = json.loads(zlib.decompress(blobs.pop("probmask:table")))
    return Pieces(header, blobs, table, version)


def pack(pieces: Pieces, *, table: bytes | None = None) -> bytes:
    """Assemble a file with correct checksums and offsets."""
    if isinstance(pieces.table, dict) and isinstance(pieces.table.get("crc32"), dict):
        pieces.table["crc32"] = {
            key: zlib.crc32(pieces.blobs[key]) if key in pieces.blobs and value != "keep" else value
            for key, value in pieces.table["crc32"].items()
        }
    if table is None:
        table = zlib.compress(json.dumps(pieces.table).encode())
    header = pieces.header | {"probmask:table": {"dtype": "U8", "shape": [len(table)]}}
    data, fields = b"", {"__metadata__": {"probmask": pieces.format}}
    for key, tensor in header.items():
        blob = table if key == "probmask:table" else pieces.blobs[key]
        fields[key] = tensor | {"data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    return container(fields, data)


def container(fields: Any, data: bytes) -> bytes:
    """Return a safetensors file with this header, valid or not."""
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


# Damage: checksums are left as they were. A reader must detect it, or read the same tensors.


def flip_header_bits(content: bytes, rng: random.Random) -> bytes:
    """Flip a bit of the safetensors header."""
    changed = bytearray(content)
    start = 8 + struct.unpack("<Q", content[:8])[0]
    changed[rng.randrange(start)] ^= 1 << rng.randrange(8)
    return bytes(changed)


# Forgeries: checksums are recomputed, so that the later checks of the reader run.


def edit_table(content: bytes, rng: random.Random) -> bytes:
    """Change one or two values in the table."""
    pieces = unpack(content)
    for _ in range(rng.randint(1, 2)):
        pieces.table = edited(pieces.table, rng, WORDS)
    return pack(pieces)


def edit_entry(content: bytes, rng: random.Random) -> bytes:
    """Change a field of a tensor's entry to another plausible value."""
    pieces = unpack(content)
    entry = rng.choice(pieces.table["tensors"])
    keys = ["name", "dtype", "shape", "encoding", "nnz", "positions", "values", "coded"]
    key = rng.choice(keys)
    other = rng.choice(pieces.table["tensors"]).get(key)
    entry[key] = rng.choice([other, near(entry.get(key), rng, WORDS), anything(rng, WORDS)])
    return pack(pieces)


def edit_coded_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change bytes of positions and of values stored as integers."""
    pieces = unpack(content)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice([k for k in pieces.blobs if pieces.header[k]["dtype"] == "U8"])
        blob = pieces.blobs[key]
        blob[rng.randrange(len(blob))] = rng.choice(
            [0, 1, 8, 12, 24, 25, 128, 254, 255, rng.randrange(256)]
        )
    return pack(pieces)


def resize_tensor(content: bytes, rng: random.Random) -> bytes:
    """Make a stored tensor longer or shorter, and update the header and the table."""
    pieces = unpack(content)
    key = rng.choice(list(pieces.blobs))
    width = len(pieces.blobs[key]) // max(1, pieces.header[key]["shape"][0])
    count = max(0, len(pieces.blobs[key]) // width + rng.randint(-9, 9))
    pieces.blobs[key] = bytearray((bytes(pieces.blobs[key]) + bytes(100))[: count * width])
    pieces.header[key]["shape"] = [count]
    for entry in pieces.table["tensors"]:
        if key == f"{entry['name']}.positions":
            entry["positions"] = count
        elif key == entry["name"]:
            entry["shape"] = [count]
        elif key == f"{entry['name']}.values":
            entry["coded" if "coded" in entry else "nnz"] = count
    return pack(pieces)


def edit_header(content: bytes, rng: random.Random) -> bytes:
    """Change the safetensors header: overlaps, holes, other dtypes."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    fields = json.loads(content[8:start])
    return container(edited(fields, rng, WORDS), content[start:])


def edit_graph(content: bytes, rng: random.Random) -> bytes:
    """Change one to three values in the graph of the network."""
    pieces = unpack(content)
    for _ in range(rng.randint(1, 3)):
        network = pieces.table["graph"]["network"]
        if rng.random() < 0.7:  # a number of one node
            node = rng.choice(network["nodes"])
            _nudge(node, rng)
        else:
            pieces.table["graph"]["network"] = edited(network, rng, WORDS)
    return pack(pieces)


def _nudge(tree: Any, rng: random.Random) -> None:
    """Change one number somewhere in a tree."""
    places = _numbers(tree)
    if places:
        container_, key = rng.choice(places)
        value = container_[key]
        container_[key] = rng.choice(
            [value + 1, value - 1, 2 * value, value // 2, -value, 0, 1, 2**20, 2**31, 1_000_003]
        )


def _numbers(tree: Any) -> list[tuple[Any, Any]]:
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    found: list[tuple[Any, Any]] = []
    for key, value in pairs:
        if isinstance(value, dict | list):
            found += _numbers(value)
        elif type(value) is int:
            found.append((tree, key))
    return found


def swap_nodes(content: bytes, rng: random.Random) -> bytes:
    """Exchange a field of two nodes."""
    pieces = unpack(content)
    first, second = rng.sample(pieces.table["graph"]["network"]["nodes"], 2)
    key = rng.choice(sorted(set(first) & set(second)))
    first[key], second[key] = second[key], first[key]
    return pack(pieces)


BOMB, NESTED = zlib.compress(b" " * 11_000_000), zlib.compress(b"[" * 100_000)


def change_table_bytes(content: bytes, rng: random.Random) -> bytes:
    """Replace the table: other JSON, damaged streams, decompression bombs."""
    pieces = unpack(content)
    text = json.dumps(pieces.table).encode()
    at = rng.randrange(len(text))
    table = rng.choice(
        [
            lambda: zlib.compress(text[:at]),
            lambda: zlib.compress(text[:at] + rng.randbytes(3) + text[at + 3 :]),
            lambda: zlib.compress(text)[: rng.randrange(60)],
            lambda: zlib.compress(text) + rng.randbytes(3),
            lambda: BOMB,
            lambda: NESTED,
            lambda: rng.randbytes(50),
        ]
    )()
    return pack(pieces, table=table)


DAMAGE: list[Mutation] = [flip_bits, flip_header_bits, cut, splice, move_blocks]
FORGERIES: list[Mutation] = [
    edit_table,
    edit_entry,
    edit_coded_bytes,
    resize_tensor,
    edit_header,
    change_table_bytes,
]
GRAPH_FORGERIES: list[Mutation] = [edit_graph, swap_nodes]
