"""A torn, damaged or malicious file is an ArtifactError, never a crash, a hang or gigabytes."""

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.mutations import DAMAGE, LARGE, LIES, N, container, pack, sample_model, unpack
from probmask import artifact
from probmask.errors import ArtifactError


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "m"
    artifact.save(sample_model(), path, metadata={"accuracy": 0.9}, values="fp16")
    return path.read_bytes()


def load(path: Path, content: bytes) -> tuple[dict[str, bytes], dict]:
    """Return all that can be learned from a file of this content."""
    path.unlink(missing_ok=True)  # ext4 syncs a file that is truncated and rewritten: slow
    path.write_bytes(content)
    state = artifact.load_state(path)
    return {k: t.reshape(-1).view(torch.uint8).numpy().tobytes() for k, t in state.items()}, (
        artifact.read(path).metadata
    )


def test_unpacking_and_packing_alone_changes_nothing(intact, tmp_path):
    assert load(tmp_path / "m", pack(unpack(intact))) == load(tmp_path / "n", intact)


def test_the_sample_has_all_there_is(intact, tmp_path):
    (tmp_path / "m").write_bytes(intact)
    rows = artifact.read(tmp_path / "m").tensors
    assert {row.encoding for row in rows} == {"dense", "bitmap", "delta", "rice"}
    assert {"large_rice.values", "large_dense", "probmask:F32"} <= unpack(intact).header.keys()


def say(name, /, **fields):
    """Change what the table says of a tensor."""
    return lambda file: file.entry(name).update(fields)


def put(name, at, byte):
    """Change a byte of a tensor's positions."""

    def change(file):
        begin, end = file.positions(name)
        file.blobs["probmask:U8"][(begin if at >= 0 else end) + at] = byte

    return change


MUTATIONS = {
    "no proper 'tensors'": lambda f: f.table.update(tensors={}),
    "no proper 'metadata'": lambda f: f.table.pop("metadata"),
    "no proper 'created_by'": lambda f: f.table.update(created_by=3),
    "no proper 'rounding'": lambda f: f.table.update(rounding=3),
    "the table is not an object": lambda f: setattr(f, "table", [f.table]),
    "alias 'tied' leads nowhere": lambda f: f.table.update(aliases={"tied": "none"}),
    "alias 'loop' leads nowhere": lambda f: f.table.update(aliases={"loop": ["dense"]}),
    "alias 'delta' leads nowhere": lambda f: f.table.update(aliases={"delta": "dense"}),
    "names a tensor twice": say("delta", name="rice"),
    "an entry of the table has no name": lambda f: f.table["tensors"].append([]),
    "an entry of the table has no": say("delta", name=3),
    "an entry of the table has no n": say("delta", name="\ud800"),
    "the name is reserved": say("delta", name="probmask:x"),
    "two parts go by the name 'rice.values'": say("steps", name="rice.values"),
    "shape is not": say("delta", shape=[1.0]),
    "shape is not a": say("delta", shape=[True]),
    "shape is not a list": say("delta", shape=[-N, -1]),
    "shape is not a list of": say("delta", shape=N),
    "shape is not a list of up": say("delta", shape=[1] * 65),
    "multiplies past": say("delta", shape=[2**40, 2**40]),
    "multiplies past 2": say("delta", shape=[0, 2**62, 2**62], nnz=0),
    "unknown dtype 'F33'": say("delta", dtype="F33"),
    r"unknown dtype \[\]": say("delta", dtype=[]),
    "unknown encoding 'zip'": say("delta", encoding="zip"),
    "unknown encoding 'delta' for I32": say("delta", dtype="I32"),
    "F32 values stored as 'BF16'": say("delta", values="BF16"),
    "BF16 values stored as 'F16'": say("weight", dtype="BF16"),
    "nnz -1": say("delta", nnz=-1),
    "nnz 1001": say("delta", nnz=N + 1),
    "positions -1 is not": say("delta", positions=-1),
    "the crc32 of 'probmask:F32'": lambda f: f.table["crc32"].update({"probmask:F32": "keep"}),
    "one crc32 for each": lambda f: f.table["crc32"].pop("large_dense"),
    "'large_rice.values' is not there as the table says: F32, shape": say("large_rice", nnz=3),
    "'large_bitmap.values' is not there as": say("large_bitmap", dtype="F64"),
    "'large_dense' is not there as": say("large_dense", shape=[2, LARGE // 2]),
    "'probmask:U8' is not there": say("large_rice", positions=4096),
    "'probmask:F32' is not there": say("dense", shape=[N + 1]),
    "'probmask:F16' is not there": lambda f: f.header.pop("probmask:F16"),
    "'probmask:U8' is not": lambda f: f.header["probmask:U8"].update(dtype="I8"),
    "'large_dense': the table does not know it": lambda f: f.table["tensors"].remove(
        f.entry("large_dense")
    ),
    "nnz is 4 but 1000 of its values": say("dense", nnz=4),
    "1500 bytes for 11992 entries": say("large_bitmap", shape=[LARGE - 8]),
    "1500 bytes for 12001 entries": say("large_bitmap", shape=[LARGE + 1]),
    "a position is .*, past the 993 entries": say("bitmap", shape=[N - 7]),
    "a position is 509, past the 400 entries": say("delta", shape=[400]),
    "a position is .*, past the 11900 entries": say("large_rice", shape=[LARGE - 100]),
    "covers more than 1900": say("large_rice", shape=[1900]),
    "but the bitmap has": put("large_bitmap", 0, 0xFF),
    "k = 25, more than 24": put("large_rice", 0, 25),
    "ends before its": put("large_rice", 0, 24),
    "does not hold nnz": put("large_rice", -1, 0),
    "neither 0 nor 1": lambda f: f.blobs["probmask:BOOL"].__setitem__(0, 2),
}


@pytest.mark.parametrize(("reason", "mutate"), MUTATIONS.items(), ids=list(MUTATIONS))
def test_a_lie_in_the_file_is_refused_with_its_reason(intact, tmp_path, reason, mutate):
    file = unpack(intact)
    mutate(file)
    with pytest.raises(ArtifactError, match=reason) as caught:
        load(tmp_path / "m", pack(file))
    assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_", ["2", "", "1.0", "x" * 999])
def test_another_version_is_refused(intact, tmp_path, format_):
    with pytest.raises(
        ArtifactError, match=r"where this probmask .* reads format 1; use a version"
    ):
        load(tmp_path / "m", pack(unpack(intact), format=format_))


SHAPES = {"2^40": [2**40], "2^61": [2**61], "10^12": [10**6, 10**6], "2^30": [N, 2**20]}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", ["bitmap", "delta", "rice", "dense", "large_rice"])
def test_a_shape_that_the_file_cannot_justify_allocates_nothing(intact, tmp_path, name, shape):
    file = unpack(intact)
    file.entry(name).update(shape=shape)
    content = pack(file)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError):
            load(tmp_path / "m", content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_zeros_that_the_file_need_not_justify_are_limited(tmp_path):
    """A terabyte of zeros is a legal network of some bytes; whoever wants it has to say so."""
    model = torch.nn.Module()
    model.register_buffer("zeros", torch.zeros(1).expand(2**10, 2**10).contiguous())
    artifact.save(model, tmp_path / "m")
    file = unpack((tmp_path / "m").read_bytes())
    file.entry("zeros").update(shape=[2**10, 2**17])
    with pytest.raises(
        ArtifactError, match=r"claim to be a network of 536870912; .* max_bytes=536"
    ):
        load(tmp_path / "n", pack(file))
    file.entry("zeros").update(shape=[2**10, 2**16])
    (tmp_path / "n").write_bytes(pack(file))
    with pytest.raises(ArtifactError, match="max_bytes"):
        artifact.load_state(tmp_path / "n", max_bytes=2**28 - 1)
    assert artifact.load_state(tmp_path / "n")["zeros"].shape == (2**10, 2**16)


def test_under_a_limit_of_memory_every_mutation_is_refused_or_loaded(intact, tmp_path):
    """In a process of its own, where half a gigabyte beyond PyTorch itself is not to be had."""
    script = Path(__file__).parents[2] / "benchmarks" / "fuzz_artifact.py"
    command = [sys.executable, script, "--mutations", "300", "--memory", "512", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 mutations" in done.stdout


def test_a_file_cut_anywhere_is_refused(intact, tmp_path):
    for length in [*range(0, len(intact), 997), 7, 8, 9, len(intact) - 1]:
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


TABLES = {
    "nested": zlib.compress(b"[" * 100_000),
    "large number": zlib.compress(b'{"tensors":1e999}'),
    "NaN": zlib.compress(b'{"tensors":NaN}'),
    "list": zlib.compress(b"[]"),
    "many digits": zlib.compress(b"9" * 5000),
    "empty text": zlib.compress(b""),
    "UTF-16": zlib.compress("{}".encode("utf-16")),
    "no Unicode": zlib.compress(b'{"\xff":0}'),
    "bomb": zlib.compress(b" " * 50_000_000),
    "empty": b"",
    "no stream": b"probmask",
    "cut": zlib.compress(b"{}" + bytes(range(256)))[:-1],
    "continued": zlib.compress(b"{}") + b"more",
}


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_the_table_is_not_trusted_either(intact, tmp_path, table):
    with pytest.raises(ArtifactError):
        load(tmp_path / "m", pack(unpack(intact), table=table))


def test_a_bomb_in_the_table_does_not_go_off(intact, tmp_path):
    content = pack(unpack(intact), table=zlib.compress(b" " * 500_000_000, 1))
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match="the table is longer than 10000000 bytes"):
            load(tmp_path / "m", content)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_file_without_a_table_is_refused(tmp_path):
    for fields in ({}, {"probmask:table": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}):
        with pytest.raises(ArtifactError, match="has no table"):
            load(tmp_path / "m", container({"__metadata__": {"probmask": "1"}} | fields, b""))


@pytest.mark.parametrize(
    ("begin", "end"), [(4, None), (0, -4), (0, 2**40), (2**40, 2**40), (0, 2**64), (-4, None)]
)
def test_overlapping_and_absent_tensors_are_refused(intact, tmp_path, begin, end):
    start = 8 + struct.unpack("<Q", intact[:8])[0]
    fields = json.loads(intact[8:start])
    last = fields["large_dense"]["data_offsets"][1]
    moved = fields["large_dense"]["data_offsets"][0] + begin
    until = last if end is None else last + end
    fields["large_dense"]["data_offsets"] = [moved, until]
    with pytest.raises(ArtifactError, match="not an intact safetensors file"):
        load(tmp_path / "m", container(fields, intact[start:]))


def test_misaligned_data_is_refused(intact, tmp_path):
    file = unpack(intact)
    file.header = {"probmask:BOOL": file.header.pop("probmask:BOOL"), **file.header}
    with pytest.raises(ArtifactError, match="not aligned"):
        load(tmp_path / "m", pack(file))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "none", "no such file"),
        (tmp_path, "not a file"),
        (tmp_path / "pipe", "not a file"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ]:
        for function in (artifact.read, artifact.load_state):
            with pytest.raises(ArtifactError, match=rf"{path}: {reason}"):
                function(path)


def test_a_file_larger_than_memory_is_refused(tmp_path):
    size = 2**43  # of holes: more than memory, which a system may refuse to map
    table = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    (tmp_path / "m").write_bytes(
        container({"__metadata__": {"probmask": "1"}, "probmask:table": table}, b"")
    )
    try:
        os.truncate(tmp_path / "m", (tmp_path / "m").stat().st_size + size)
    except OSError:
        pytest.skip("the file system holds no such file")
    with pytest.raises(ArtifactError, match=f"{tmp_path / 'm'}: "):
        artifact.read(tmp_path / "m")


def test_one_flipped_bit_in_any_byte_is_noticed(intact, tmp_path):
    """The checksums cover every byte, so nothing changes in silence: not even a value."""
    before = load(tmp_path / "m", intact)
    start = 8 + struct.unpack("<Q", intact[:8])[0]
    for at in [*range(start + 200), *range(start + 200, len(intact), 37)]:
        content = bytearray(intact)
        content[at] ^= 1 << at % 8
        try:
            after = load(tmp_path / "m", bytes(content))
        except ArtifactError:
            continue
        assert after == before, at


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DAMAGE), st.integers(0, 2**32))
def test_damage_is_noticed(intact, tmp_path_factory, damage, seed):
    path = tmp_path_factory.getbasetemp() / "damaged"
    try:
        after = load(path, damage(intact, random.Random(seed)))
    except ArtifactError:
        return
    assert after == load(path, intact)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LIES), st.integers(0, 2**32))
def test_lies_are_refused_or_make_another_artifact(intact, tmp_path_factory, lie, seed):
    """With checksums that are right, what loads is what `save` could have written."""
    path = tmp_path_factory.getbasetemp() / "lie"
    try:
        load(path, lie(intact, random.Random(seed)))
    except ArtifactError:
        return
    for row in artifact.read(path).tensors:
        tensor = artifact.load_state(path)[row.name]
        assert tuple(tensor.shape) == row.shape
        width = tensor.dtype.itemsize
        raw = tensor.reshape(-1).view(torch.uint8).reshape(-1, width) if tensor.numel() else tensor
        assert int(raw.any(-1).count_nonzero() if tensor.numel() else 0) == row.nnz


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["large_bitmap", "large_rice"]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_positions_changed_on_purpose_move_values_but_keep_them_inside(
    intact, tmp_path_factory, name, edits
):
    path = tmp_path_factory.getbasetemp() / "moved"
    file = unpack(intact)
    begin, end = file.positions(name)
    for at, byte in edits:
        file.blobs["probmask:U8"][begin + at % (end - begin)] = byte
    try:
        after, _ = load(path, pack(file))
    except ArtifactError:
        return
    before, _ = load(path, intact)
    for other in before.keys() - {name}:
        assert after[other] == before[other]
    words = [struct.unpack(f"<{LARGE}I", state[name]) for state in (before, after)]
    assert [w for w in words[0] if w] == [w for w in words[1] if w]
