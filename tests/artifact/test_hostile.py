"""A truncated, damaged or malicious file raises ArtifactError; no crash, no hang, no gigabytes."""

import copy
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact.mutations import (
    DAMAGE,
    FORGERIES,
    LARGE,
    GraphSample,
    N,
    container,
    pack,
    sample_model,
    unpack,
)
from probmask import artifact, runtime
from probmask.errors import ArtifactError


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("intact") / "m"
    artifact.save(sample_model(), path, metadata={"accuracy": 0.9}, values="fp16")
    return path.read_bytes()


@pytest.fixture(scope="module")
def integers(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("integers") / "m"
    artifact.save(sample_model(), path, metadata={"accuracy": 0.9}, values="int8")
    return path.read_bytes()


@pytest.fixture(scope="module", params=["fp16", "int8"])
def either(request, intact, integers) -> bytes:
    return intact if request.param == "fp16" else integers


def load(path: Path, content: bytes) -> tuple[dict[str, bytes], dict]:
    """Write a file with this content; return its tensors as bytes, and its metadata."""
    path.unlink(missing_ok=True)  # ext4 syncs a file that is truncated and rewritten: slow
    path.write_bytes(content)
    state = artifact.load_state(path)
    return {k: t.reshape(-1).view(torch.uint8).numpy().tobytes() for k, t in state.items()}, (
        artifact.read(path).metadata
    )


def test_unpacking_and_packing_changes_nothing(either, tmp_path):
    assert load(tmp_path / "m", pack(unpack(either))) == load(tmp_path / "n", either)


def test_the_sample_has_every_encoding_packed_and_unpacked(intact, tmp_path):
    (tmp_path / "m").write_bytes(intact)
    rows = artifact.read(tmp_path / "m").tensors
    assert {row.encoding for row in rows} == {"dense", "bitmap", "delta", "rice"}
    assert {"large_rice.values", "large_dense", "probmask:F32"} <= unpack(intact).header.keys()


def test_the_sample_has_integers_packed_and_unpacked(integers, tmp_path):
    (tmp_path / "m").write_bytes(integers)
    rows = artifact.read(tmp_path / "m").tensors
    stored = {row.name: row.encoding for row in rows if row.values == "int8"}
    assert stored == {"weight": "rice", "large_weight": "bitmap", "filled": "dense"}
    assert {"large_weight.values", "probmask:U8"} <= unpack(integers).header.keys()


def set_fields(name, /, **fields):
    """Change fields of a tensor's entry in the table."""
    return lambda file: file.entry(name).update(fields)


def set_position(name, at, byte):
    """Change a byte of a tensor's positions."""

    def change(file):
        begin, end = file.positions(name)
        file.blobs["probmask:U8"][(begin if at >= 0 else end) + at] = byte

    return change


MUTATIONS = {
    "no valid 'tensors'": lambda f: f.table.update(tensors={}),
    "no valid 'metadata'": lambda f: f.table.pop("metadata"),
    "no valid 'created_by'": lambda f: f.table.update(created_by=3),
    "no valid 'rounding'": lambda f: f.table.update(rounding=3),
    "the table is not an object": lambda f: setattr(f, "table", [f.table]),
    "alias 'tied' is not a new name": lambda f: f.table.update(aliases={"tied": "none"}),
    "alias 'loop' is not a new name": lambda f: f.table.update(aliases={"loop": ["dense"]}),
    "alias 'delta' is not a new name": lambda f: f.table.update(aliases={"delta": "dense"}),
    "names a tensor twice": set_fields("delta", name="rice"),
    "an entry of the table has no name": lambda f: f.table["tensors"].append([]),
    "an entry of the table has no": set_fields("delta", name=3),
    "an entry of the table has no n": set_fields("delta", name="\ud800"),
    "the name is reserved": set_fields("delta", name="probmask:x"),
    "two parts have the name 'rice.values'": set_fields("steps", name="rice.values"),
    "shape is not": set_fields("delta", shape=[1.0]),
    "shape is not a": set_fields("delta", shape=[True]),
    "shape is not a list": set_fields("delta", shape=[-N, -1]),
    "shape is not a list of": set_fields("delta", shape=N),
    "shape is not a list of up": set_fields("delta", shape=[1] * 65),
    "shape exceeds": set_fields("delta", shape=[2**40, 2**40]),
    "shape exceeds 2": set_fields("delta", shape=[0, 2**62, 2**62], nnz=0),
    "unknown dtype 'F33'": set_fields("delta", dtype="F33"),
    r"unknown dtype \[\]": set_fields("delta", dtype=[]),
    "unknown encoding 'zip'": set_fields("delta", encoding="zip"),
    "unknown encoding 'delta' for I32": set_fields("delta", dtype="I32"),
    "F32 values cannot be stored as 'BF16'": set_fields("delta", values="BF16"),
    "BF16 values cannot be stored as 'F16'": set_fields("weight", dtype="BF16"),
    "nnz -1": set_fields("delta", nnz=-1),
    "nnz 1001": set_fields("delta", nnz=N + 1),
    "positions -1 is not": set_fields("delta", positions=-1),
    "the crc32 of 'probmask:F32'": lambda f: f.table["crc32"].update({"probmask:F32": "keep"}),
    "one crc32 for each": lambda f: f.table["crc32"].pop("large_dense"),
    "'large_rice.values' does not match the table: expected F32 of shape \\[3\\]": set_fields(
        "large_rice", nnz=3
    ),
    "'large_bitmap.values' does not match the table": set_fields("large_bitmap", dtype="F64"),
    "'large_dense' does not match the table": set_fields("large_dense", shape=[2, LARGE // 2]),
    "'probmask:U8' does not match the table: expected": set_fields("large_rice", positions=4096),
    "'probmask:F32' does not match the table": set_fields("dense", shape=[N + 1]),
    "'probmask:F16' does not match the table": lambda f: f.header.pop("probmask:F16"),
    "'probmask:U8' does not match the table": lambda f: f.header["probmask:U8"].update(dtype="I8"),
    "'large_dense' is not in the table": lambda f: f.table["tensors"].remove(
        f.entry("large_dense")
    ),
    "nnz is 4, but 1000 of its values": set_fields("dense", nnz=4),
    "1500 bytes does not fit 11992 entries": set_fields("large_bitmap", shape=[LARGE - 8]),
    "1500 bytes does not fit 12001 entries": set_fields("large_bitmap", shape=[LARGE + 1]),
    "position .* is out of range for 993 entries": set_fields("bitmap", shape=[N - 7]),
    "position 509 is out of range for 400 entries": set_fields("delta", shape=[400]),
    "position .* is out of range for 11900 entries": set_fields("large_rice", shape=[LARGE - 100]),
    "covers more than 1900": set_fields("large_rice", shape=[1900]),
    "but the bitmap has": set_position("large_bitmap", 0, 0xFF),
    "k = 25, more than 24": set_position("large_rice", 0, 25),
    "ends before its": set_position("large_rice", 0, 24),
    "does not contain nnz": set_position("large_rice", -1, 0),
    "neither 0 nor 1": lambda f: f.blobs["probmask:BOOL"].__setitem__(0, 2),
}


@pytest.mark.parametrize(("reason", "mutate"), MUTATIONS.items(), ids=list(MUTATIONS))
def test_a_forged_file_raises_with_the_reason(intact, tmp_path, reason, mutate):
    file = unpack(intact)
    mutate(file)
    with pytest.raises(ArtifactError, match=reason) as caught:
        load(tmp_path / "m", pack(file))
    assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format_", ["4", "", "1.0", "x" * 999])
def test_another_format_version_raises(intact, tmp_path, format_):
    with pytest.raises(
        ArtifactError,
        match=r"not supported: .* reads formats 1, 2 and 3; install a version",
    ):
        load(tmp_path / "m", pack(replace(unpack(intact), format=format_)))


def stream(name, change):
    """Change the bytes of the values of a large tensor, and their number."""

    def mutate(file):
        blob = change(file.blobs[f"{name}.values"])
        file.blobs[f"{name}.values"] = blob
        file.header[f"{name}.values"]["shape"] = [len(blob)]
        file.entry(name)["coded"] = len(blob)

    return mutate


def at(index, *values):
    """Replace bytes from an index on."""
    return lambda blob: bytearray([*blob[:index], *values, *blob[index + len(values) :]])


LANES = "large_weight"  # 100 codes, then 900 bytes of signs, then the magnitudes
INTEGER_MUTATIONS = {
    "a file of format 1 has values stored as integers": lambda f: setattr(f, "format", "1"),
    "F32 values cannot be stored as 'int9'": set_fields(LANES, values="int9"),
    "F32 values cannot be stored as 'int1'": set_fields(LANES, values="int1"),
    "I32 values cannot be stored as 'int8'": set_fields("steps", dtype="I32", values="int8"),
    "coded -1 is not a valid number": set_fields(LANES, coded=-1),
    "coded '3' is not a valid number": set_fields(LANES, coded="3"),
    "a tensor without dimensions or values": set_fields("filled", shape=[], nnz=1),
    "a tensor without dimensions or": set_fields("filled", shape=[0], nnz=0),
    "dense integers, but nnz 71 is not": set_fields("filled", nnz=71),
    "does not match the table: expected U8": set_fields(LANES, coded=5000),
    "bytes do not hold": set_fields("filled", shape=[2**24], nnz=2**24),
    "is not a magnitude of 4 bits": set_fields(LANES, values="int4"),
    "the code 32767 is not that of a scale": stream(LANES, at(0, 0xFF, 0x7F)),
    "has 9 low bits, more than 8": stream(LANES, at(2, 9, 0)),
    "symbols of more than 8 bits": stream(LANES, at(2, 8, 1)),
    "a scale is too large": stream(LANES, at(0, 0, 8)),
    "nnz is .* of its values are not zero": stream(LANES, at(0, 0, 248)),
    "ends too early": stream(LANES, lambda blob: blob[:-1]),
    "ends too": stream(LANES, lambda blob: blob[:900]),
    "3 bytes too many": stream(LANES, lambda blob: blob + bytes(3)),
}


@pytest.mark.parametrize(
    ("reason", "mutate"), INTEGER_MUTATIONS.items(), ids=list(INTEGER_MUTATIONS)
)
def test_forged_integers_raise_with_the_reason(integers, tmp_path, reason, mutate):
    file = unpack(integers)
    mutate(file)
    with pytest.raises(ArtifactError, match=reason):
        load(tmp_path / "m", pack(file))


SHAPES = {"2^40": [2**40], "2^61": [2**61], "10^12": [10**6, 10**6], "2^30": [N, 2**20]}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("name", ["bitmap", "delta", "rice", "dense", "large_rice"])
def test_a_forged_shape_allocates_no_memory(intact, tmp_path, name, shape):
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


def test_the_number_of_zeros_is_limited(tmp_path):
    """A few bytes can encode a terabyte of zeros. Loading that needs `max_bytes`."""
    model = torch.nn.Module()
    model.register_buffer("zeros", torch.zeros(1).expand(2**10, 2**10).contiguous())
    artifact.save(model, tmp_path / "m")
    file = unpack((tmp_path / "m").read_bytes())
    file.entry("zeros").update(shape=[2**10, 2**17])
    with pytest.raises(ArtifactError, match=r"its tensors take 536870912; .* max_bytes=536"):
        load(tmp_path / "n", pack(file))
    file.entry("zeros").update(shape=[2**10, 2**16])
    (tmp_path / "n").write_bytes(pack(file))
    with pytest.raises(ArtifactError, match="max_bytes"):
        artifact.load_state(tmp_path / "n", max_bytes=2**28 - 1)
    assert artifact.load_state(tmp_path / "n")["zeros"].shape == (2**10, 2**16)


def test_every_mutation_raises_or_loads_within_a_memory_limit(intact, tmp_path):
    """Runs in a process that is limited to 512 MiB beyond PyTorch itself."""
    script = Path(__file__).parents[2] / "benchmarks" / "fuzz_artifact.py"
    command = [sys.executable, script, "--mutations", "300", "--memory", "512", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 mutations" in done.stdout


def test_a_truncated_file_raises(either, tmp_path):
    for length in [*range(0, len(either), 997), 7, 8, 9, len(either) - 1]:
        with pytest.raises(ArtifactError):
            load(tmp_path / "m", either[:length])


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
def test_a_file_of_another_kind_raises(tmp_path, content):
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
def test_an_invalid_table_raises(intact, tmp_path, table):
    with pytest.raises(ArtifactError):
        load(tmp_path / "m", pack(unpack(intact), table=table))


def test_a_decompression_bomb_in_the_table_allocates_little(intact, tmp_path):
    content = pack(unpack(intact), table=zlib.compress(b" " * 500_000_000, 1))
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match="the table is longer than 10000000 bytes"):
            load(tmp_path / "m", content)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_a_file_without_a_table_raises(tmp_path):
    for fields in ({}, {"probmask:table": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}):
        with pytest.raises(ArtifactError, match="has no table"):
            load(tmp_path / "m", container({"__metadata__": {"probmask": "1"}} | fields, b""))


@pytest.mark.parametrize(
    ("begin", "end"), [(4, None), (0, -4), (0, 2**40), (2**40, 2**40), (0, 2**64), (-4, None)]
)
def test_overlapping_and_absent_tensors_raise(intact, tmp_path, begin, end):
    start = 8 + struct.unpack("<Q", intact[:8])[0]
    fields = json.loads(intact[8:start])
    last = fields["large_dense"]["data_offsets"][1]
    moved = fields["large_dense"]["data_offsets"][0] + begin
    until = last if end is None else last + end
    fields["large_dense"]["data_offsets"] = [moved, until]
    with pytest.raises(ArtifactError, match="not an intact safetensors file"):
        load(tmp_path / "m", container(fields, intact[start:]))


def test_misaligned_data_raises(intact, tmp_path):
    file = unpack(intact)
    file.header = {"probmask:BOOL": file.header.pop("probmask:BOOL"), **file.header}
    with pytest.raises(ArtifactError, match="not aligned"):
        load(tmp_path / "m", pack(file))


def test_a_missing_file_a_directory_and_a_pipe_raise(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "none", "no such file"),
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "not a file"),
        (tmp_path / ("x" * 300), "cannot be read"),
    ]:
        for function in (artifact.read, artifact.load_state):
            with pytest.raises(ArtifactError, match=rf"{path}: {reason}"):
                function(path)


def test_a_file_larger_than_memory_raises(tmp_path):
    size = 2**43  # sparse on disk, but larger than memory: the system may refuse to map it
    table = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    (tmp_path / "m").write_bytes(
        container({"__metadata__": {"probmask": "1"}, "probmask:table": table}, b"")
    )
    try:
        os.truncate(tmp_path / "m", (tmp_path / "m").stat().st_size + size)
    except OSError:
        pytest.skip("the file system cannot store such a file")
    with pytest.raises(ArtifactError, match=f"{tmp_path / 'm'}: "):
        artifact.read(tmp_path / "m")


def test_one_flipped_bit_in_any_byte_is_detected(either, tmp_path):
    """The checksums cover every byte, so that no value changes unnoticed."""
    before = load(tmp_path / "m", either)
    start = 8 + struct.unpack("<Q", either[:8])[0]
    for at in [*range(start + 200), *range(start + 200, len(either), 37)]:
        content = bytearray(either)
        content[at] ^= 1 << at % 8
        try:
            after = load(tmp_path / "m", bytes(content))
        except ArtifactError:
            continue
        assert after == before, at


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(DAMAGE), st.integers(0, 2**32))
def test_damage_is_detected(either, tmp_path_factory, damage, seed):
    path = tmp_path_factory.getbasetemp() / "damaged"
    try:
        after = load(path, damage(either, random.Random(seed)))
    except ArtifactError:
        return
    assert after == load(path, either)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(FORGERIES), st.integers(0, 2**32))
def test_forgeries_raise_or_are_another_valid_artifact(either, tmp_path_factory, forge, seed):
    """A forged file with correct checksums that loads is one that `save` could have written."""
    path = tmp_path_factory.getbasetemp() / "forged"
    try:
        load(path, forge(either, random.Random(seed)))
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
def test_forged_positions_move_values_but_keep_them_in_range(intact, tmp_path_factory, name, edits):
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


@pytest.fixture(scope="module")
def with_graph(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("graph") / "m"
    artifact.save(GraphSample().eval(), path, graph=True, example=GraphSample.inputs(2))
    return path.read_bytes()


def node(kind, index=0, /, **fields):
    """Change fields of a node of the graph; a function gets the old value."""

    def mutate(file):
        nodes = file.table["graph"]["network"]["nodes"]
        own = [node for node in nodes if node["kind"] == kind][index]
        for key, value in fields.items():
            own[key] = value(own[key]) if callable(value) else value

    return mutate


def network(**fields):
    """Change fields of the graph's network."""
    return lambda f: f.table["graph"]["network"].update(fields)


def longer(change):
    """Change the first factor of the last dimension of a view."""

    def mutate(views):
        change(views[0]["dimensions"][-1][0])
        return views

    return mutate


def read_steps_first(file):
    """Let a layer read a tensor whose batch is not its first dimension."""
    nodes = file.table["graph"]["network"]["nodes"]
    moved = next(node for node in nodes if node["kind"] == "Move")
    reader = copy.deepcopy(next(node for node in nodes if node["kind"] == "Normalize"))
    nodes.append(reader | {"name": "reader", "inputs": [moved["name"]]})


GRAPH_MUTATIONS = {
    "a file of format 2 has a graph": lambda f: setattr(f, "format", "2"),
    "the graph has version 2, but only 1 is known": lambda f: f.table["graph"].update(version=2),
    "no valid 'graph'": lambda f: f.table.update(graph=[]),
    "no valid 'network'": lambda f: f.table["graph"].update(network=3),
    "does not start with probmask:graph.": lambda f: f.table["graph"]["tensors"][0].update(
        name="mine"
    ),
    "the graph has no valid 'nodes'": network(nodes={}),
    "the graph has no input": network(inputs=[]),
    "only its first size may vary": network(
        inputs=[{"name": "images", "shape": ["N", 3, "H", 8], "dtype": "float32"}]
    ),
    "unknown dtype 'object'": network(
        inputs=[{"name": "images", "shape": ["N", 3, 8, 8], "dtype": "object"}]
    ),
    "what the network returns is not valid": network(outputs=3),
    "the output 'nothing' is not computed": network(outputs={"value": "nothing"}),
    "unknown kind 'Fallback'": node("Pool", kind="Fallback"),
    "unknown kind 'os.system'": node("Pool", kind="os.system"),
    "unknown field": node("Pool", call="print"),
    "'later' is not computed before it": node("Pool", inputs=["later"]),
    "a window leaves its input": node("Pool", rows=[[0, 2], [2, 5]]),
    "a window leaves": node("Pool", rows=[[0, 2], [2, 2]]),
    "its shape does not fit its form": node("Pool", trailing=[9, 9, 9]),
    "refers to a tensor 'nothing'": node("Normalize", scale={"tensor": "nothing", "shape": [8]}),
    "with the shape": node("Normalize", scale={"tensor": "norm.weight", "shape": [-8]}),
    "does not have the shape": node("Normalize", scale={"tensor": "norm.weight", "shape": [9]}),
    "its scale has not the shape": node(
        "Normalize", scale={"tensor": "classifier.weight", "shape": [40]}
    ),
    "its epsilon is not valid": node("Normalize", epsilon=-1.0),
    "epsilon is 'nan'": node("Normalize", epsilon="nan"),
    "its kernel is larger": node("Convolution", dilation=[9, 9]),
    "a size is not valid": node("Convolution", stride=[0, 1]),
    "its output has another size": node("Convolution", stride=[1, 1]),
    "its rank is 3": node("Convolution", rank=3),
    "groups is True": node("Convolution", groups=True),
    "its weight does not fit its output": node("Convolution", groups=3),
    "its BatchNorm does not fit its weight": node(
        "Convolution", folded=lambda old: old | {"bias": {"tensor": "heads.bias", "shape": [24]}}
    ),
    "it has no BatchNorm to fold": node("Convolution", 1, unfolded=True),
    "a view leaves its tensor": node(
        "Convolution", 1, views=longer(lambda factor: factor.update(size=9))
    ),
    "a head leaves its tensor": node("Attention", heads=[[0, 8, 16], [4, 12, 21]]),
    "its heads do not fit its output": node("Attention", depth=5),
    "its keys leave their tensor": node("Attention", keys=99),
    "its table has no rows": node("Embed", table={"tensor": "norm.weight", "shape": [8]}),
    "is 1099511627777": node("Pool", trailing=[2**40 + 1]),
    "an input has another form": read_steps_first,
}


@pytest.mark.parametrize(("reason", "mutate"), GRAPH_MUTATIONS.items(), ids=list(GRAPH_MUTATIONS))
def test_forged_graphs_raise_with_the_reason(with_graph, tmp_path, reason, mutate):
    file = unpack(with_graph)
    mutate(file)
    (tmp_path / "m").write_bytes(pack(file))
    with pytest.raises(ArtifactError, match=reason) as caught:
        runtime.load(tmp_path / "m", threads=1)
    assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")


def test_the_sample_has_most_kinds_of_nodes(with_graph, tmp_path):
    (tmp_path / "m").write_bytes(with_graph)
    engine = runtime.load(tmp_path / "m", threads=1)
    found = engine(*(tensor.numpy() for tensor in GraphSample.inputs(3)))
    with torch.no_grad():
        expected = GraphSample().eval()(*GraphSample.inputs(3))
    for name, array in found.items():
        assert torch.allclose(torch.from_numpy(array), expected[name], atol=1e-5)
    kinds = {node["kind"] for node in unpack(with_graph).table["graph"]["network"]["nodes"]}
    assert {"Attention", "Convolution", "Embed", "Move", "Normalize", "Pool", "Rearrange"} <= kinds
