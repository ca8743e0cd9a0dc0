"""A torn, damaged or malicious file is an ArtifactError, never a crash, a hang or gigabytes."""

import json
import os
import struct
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from probmask import artifact
from probmask.artifact.header import KEY
from probmask.errors import ArtifactError

N = 1000


def model() -> nn.Module:
    torch.manual_seed(0)
    bag = nn.Module()
    for name, density in (("bitmap", 0.5), ("delta", 0.03)):
        bag.register_buffer(name, torch.where(torch.rand(N) < density, torch.randn(N), 0.0))
    bag.register_buffer("dense", torch.randn(10))
    bag.register_buffer("flags", torch.tensor([True, False]))
    bag.register_buffer("tied", bag.dense)
    return bag


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "m"
    artifact.save(model(), path, metadata={"accuracy": 0.9})
    return path.read_bytes()


def load(path: Path, content: bytes) -> tuple[dict[str, bytes], dict]:
    """Return all that can be learned from a file of this content."""
    path.unlink(missing_ok=True)  # ext4 syncs a file that is truncated and rewritten: slow
    path.write_bytes(content)
    state = artifact.load_state(path)
    return {k: t.reshape(-1).view(torch.uint8).numpy().tobytes() for k, t in state.items()}, (
        artifact.read(path).metadata
    )


def unpack(content: bytes) -> SimpleNamespace:
    """Return a file in pieces that can be changed."""
    (length,) = struct.unpack("<Q", content[:8])
    outer = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    parts = {k: v for k, v in outer.items() if k != "__metadata__"}
    blobs = {k: bytearray(data[slice(*v["data_offsets"])]) for k, v in parts.items()}
    ours = json.loads(outer["__metadata__"][KEY])
    return SimpleNamespace(parts=parts, blobs=blobs, ours=ours, tensors=ours["tensors"])


def pack(file: SimpleNamespace) -> bytes:
    """Return a file of the pieces with all checksums and offsets in order."""
    for name, entry in file.tensors.items():
        if isinstance(entry, dict):
            keys = [name + suffix for suffix in ("", ".values", ".positions")]
            content = b"".join(file.blobs.get(key, b"") for key in keys)
            entry["crc32"] = entry.get("crc32") and zlib.crc32(content)
    ours = json.dumps(file.ours)
    outer = {"__metadata__": {KEY: ours, f"{KEY}_crc32": f"{zlib.crc32(ours.encode()):08x}"}}
    data = b""
    for name, part in file.parts.items():
        offsets = [len(data), len(data) + len(file.blobs[name])]
        outer[name] = part | {"data_offsets": offsets}
        data += file.blobs[name]
    text = json.dumps(outer).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def test_unpacking_and_packing_alone_changes_nothing(intact, tmp_path):
    assert load(tmp_path / "m", pack(unpack(intact))) == load(tmp_path / "n", intact)


MUTATIONS = {
    "format 2, where this": lambda f: f.ours.update(format=2),
    "format None": lambda f: f.ours.pop("format"),
    "no proper 'tensors'": lambda f: f.ours.update(tensors=[]),
    "no proper 'metadata'": lambda f: f.ours.pop("metadata"),
    "no proper 'created_by'": lambda f: f.ours.update(created_by=3),
    "alias 'tied' leads nowhere": lambda f: f.ours.update(aliases={"tied": "none"}),
    "alias 'loop' leads nowhere": lambda f: f.ours.update(aliases={"loop": ["dense"]}),
    "alias 'delta' leads nowhere": lambda f: f.ours.update(aliases={"delta": "dense"}),
    "not an object": lambda f: f.tensors.update(delta=[]),
    "shape is not": lambda f: f.tensors["delta"].update(shape=[1.0]),
    "shape is not a": lambda f: f.tensors["delta"].update(shape=[True]),
    "shape is not a list": lambda f: f.tensors["delta"].update(shape=[-N, -1]),
    "shape is not a list of": lambda f: f.tensors["delta"].update(shape=N),
    "multiplies past": lambda f: f.tensors["delta"].update(shape=[2**62, 2**62]),
    "multiplies past 2": lambda f: f.tensors["delta"].update(shape=[0, 2**62, 2**62], nnz=0),
    "unknown dtype 'F33'": lambda f: f.tensors["delta"].update(dtype="F33"),
    r"unknown dtype \[\]": lambda f: f.tensors["delta"].update(dtype=[]),
    "unknown encoding 'zip'": lambda f: f.tensors["delta"].update(encoding="zip"),
    "unknown encoding 'delta' for I32": lambda f: f.tensors["delta"].update(dtype="I32"),
    "nnz -1": lambda f: f.tensors["delta"].update(nnz=-1),
    "nnz 1001": lambda f: f.tensors["delta"].update(nnz=N + 1),
    "its crc32": lambda f: f.tensors["delta"].update(crc32=None),
    "'delta.values' is not there as": lambda f: f.tensors["delta"].update(nnz=3),
    "'bitmap.values' is not there as": lambda f: f.tensors["bitmap"].update(dtype="F16"),
    "'dense' is not there as": lambda f: f.tensors["dense"].update(shape=[2, 5]),
    "'dense' is not there": lambda f: (f.parts.pop("dense"), f.blobs.pop("dense")),
    "'delta.positions' is not there": lambda f: f.parts.pop("delta.positions"),
    "'delta.positions' is not": lambda f: f.parts["delta.positions"].update(dtype="I8"),
    "'flags': the header does not know it": lambda f: f.tensors.pop("flags"),
    "'delta' is not there": lambda f: f.tensors["delta"].update(encoding="dense"),
    "nnz is 4 but the data has 10": lambda f: f.tensors["dense"].update(nnz=4),
    "do not fit 1001 entries as bitmap": lambda f: f.tensors["bitmap"].update(shape=[N + 1]),
    "do not fit 992 entries as bitmap": lambda f: f.tensors["bitmap"].update(shape=[N - 8]),
    "do not fit 1048576000 entries as delta": lambda f: f.tensors["delta"].update(shape=[N, 2**20]),
    "covers 1000 of 999 entries": lambda f: f.tensors["delta"].update(shape=[N - 1]),
    "covers 1000 of 1001 entries": lambda f: f.tensors["delta"].update(shape=[N + 1]),
    "bits set past its 999": lambda f: (
        f.tensors["bitmap"].update(shape=[N - 1])
        or f.blobs["bitmap.positions"].__setitem__(-1, 0x80)
    ),
    "bits set$": lambda f: f.blobs["bitmap.positions"].__setitem__(0, 0xFF),
    "covers .* of 1000": lambda f: f.blobs["delta.positions"].__setitem__(0, 200),
    r"does not hold nnz \+ 1": lambda f: f.blobs["delta.positions"].__setitem__(0, 255),
    r"does not hold nnz \+ 1 =": lambda f: f.blobs["delta.positions"].__setitem__(-1, 255),
    "neither 0 nor 1": lambda f: f.blobs["flags"].__setitem__(0, 2),
}


@pytest.mark.parametrize(("reason", "mutate"), MUTATIONS.items(), ids=list(MUTATIONS))
def test_a_lie_in_the_file_is_refused_with_its_reason(intact, tmp_path, reason, mutate):
    file = unpack(intact)
    mutate(file)
    with pytest.raises(ArtifactError, match=reason) as caught:
        load(tmp_path / "m", pack(file))
    assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "shape", [[2**40], [2**62], [10**6, 10**6], [N, 2**20]], ids=["2^40", "2^62", "10^12", "2^30"]
)
@pytest.mark.parametrize("name", ["bitmap", "delta", "dense"])
def test_a_shape_that_the_file_cannot_justify_allocates_nothing(intact, tmp_path, name, shape):
    file = unpack(intact)
    file.tensors[name].update(shape=shape)
    content = pack(file)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            load(tmp_path / "m", content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_file_cut_anywhere_is_refused(intact, tmp_path):
    for length in [*range(0, len(intact), 97), 7, 8, 9, len(intact) - 1]:
        with pytest.raises(ArtifactError):
            load(tmp_path / "m", intact[:length])


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + bytes(100),
        struct.pack("<Q", 10**9) + bytes(100),
        struct.pack("<Q", 100_000) + b"{" * 100_000,
        struct.pack("<Q", 100_000) + b'{"a":' + b"[" * 99_995,
        struct.pack("<Q", 2) + b"{}",
        b"PK\x03\x04 a pickle of torch.save" + bytes(100),
    ],
    ids=["2^63", "10^9", "braces", "nested", "empty", "zip"],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    with pytest.raises(ArtifactError):
        load(tmp_path / "m", content)


def test_json_within_json_is_not_trusted_either(intact, tmp_path):
    for ours in ("[" * 100_000, '{"format":1e999}', '{"format":NaN}', "[]", "9" * 5000, ""):
        outer = {"__metadata__": {KEY: ours, f"{KEY}_crc32": f"{zlib.crc32(ours.encode()):08x}"}}
        text = json.dumps(outer).encode()
        with pytest.raises(ArtifactError):
            load(tmp_path / "m", struct.pack("<Q", len(text)) + text)


def test_overlapping_tensors_are_refused(intact, tmp_path):
    changed = intact.replace(b'"data_offsets":[0,', b'"data_offsets":[4,', 1)
    with pytest.raises(ArtifactError, match="not an intact safetensors file"):
        load(tmp_path / "m", changed)


def test_misaligned_data_is_refused(intact, tmp_path):
    file = unpack(intact)
    file.parts["delta.values"] = file.parts.pop("delta.values")
    while sum(len(file.blobs[name]) for name in list(file.parts)[:-1]) % 4 == 0:
        file.blobs["flags"].append(0)
        file.parts["flags"]["shape"] = file.tensors["flags"]["shape"] = [len(file.blobs["flags"])]
    with pytest.raises(ArtifactError, match="not aligned"):
        load(tmp_path / "m", pack(file))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "none", "no such file"),
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a file"),
    ]:
        for function in (artifact.read, artifact.load_state):
            with pytest.raises(ArtifactError, match=rf"{path}: {reason}"):
                function(path)


def test_one_flipped_bit_in_any_byte_is_noticed(intact, tmp_path):
    """The checksums cover every byte, so nothing changes in silence: not even a value."""
    before = load(tmp_path / "m", intact)
    for at in range(len(intact)):
        content = bytearray(intact)
        content[at] ^= 1 << at % 8
        try:
            after = load(tmp_path / "m", bytes(content))
        except ArtifactError:
            continue
        assert after == before, at


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.binary(max_size=9), st.integers(0, 9)),
        min_size=1,
        max_size=4,
    )
)
def test_bytes_replaced_added_and_cut_are_noticed(intact, tmp_path_factory, edits):
    path = tmp_path_factory.getbasetemp() / "edited"
    content = intact
    for where, added, cut in edits:
        at = int(where * len(content))
        content = content[:at] + added + content[at + cut :]
    try:
        after = load(path, content)
    except ArtifactError:
        return
    assert after == load(path, intact)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["bitmap.positions", "delta.positions"]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_positions_changed_on_purpose_move_values_but_keep_them_inside(
    intact, tmp_path_factory, key, edits
):
    path = tmp_path_factory.getbasetemp() / "moved"
    file = unpack(intact)
    for at, byte in edits:
        file.blobs[key][at % len(file.blobs[key])] = byte
    try:
        after, _ = load(path, pack(file))
    except ArtifactError:
        return
    before, _ = load(path, intact)
    name = key.partition(".")[0]
    for other in before.keys() - {name}:
        assert after[other] == before[other]
    words = [struct.unpack(f"<{N}I", state[name]) for state in (before, after)]
    assert [w for w in words[0] if w] == [w for w in words[1] if w]
