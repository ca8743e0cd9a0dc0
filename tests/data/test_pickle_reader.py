"""Pickles: plain data as `pickle.loads` returns it, and everything else rejected unexecuted."""

import os
import pickle
import pickletools
import struct
import tracemalloc
from collections import OrderedDict
from datetime import date

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probmask.data.pickle_reader import read_pickle
from probmask.errors import InputError

PROTOCOLS = [2, 3, 4, 5]
OTHER_DTYPES = ["?", "i1", "<i2", ">i2", "<u4", "<i8", "<f4", ">f8", "<c16"]


def read(data):
    return read_pickle(data, source="data_batch_1")


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.flags.f_contiguous == theirs.flags.f_contiguous
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert ours == theirs or ours != ours


def assert_plain(value):
    assert type(value) in (dict, list, tuple, bytes, str, int, float, bool, type(None)) or (
        isinstance(value, np.ndarray) and value.dtype == np.uint8
    )
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for part in value:
            assert_plain(part)


class Python2:
    """Write what cPickle of Python 2 writes at protocol 2, every value with its memo index."""

    def __init__(self):
        self.count = 0

    def memo(self):
        self.count += 1
        return (
            b"q" + bytes([self.count]) if self.count < 256 else b"r" + struct.pack("<I", self.count)
        )

    def file(self, value):
        return b"\x80\x02" + self.any(value) + b"."

    def any(self, value):
        writers = {dict: self.dict, list: self.list, bytes: self.text, int: self.int}
        return writers.get(type(value), self.array)(value)

    def int(self, value):
        if 0 <= value < 2**8:
            return b"K" + struct.pack("<B", value)
        if 0 <= value < 2**16:
            return b"M" + struct.pack("<H", value)
        return b"J" + struct.pack("<i", value) if abs(value) < 2**31 else b"I%d\n" % value

    def text(self, value):
        short = len(value) < 256
        length = b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        return length + value + self.memo()

    def list(self, values):
        start = b"]" + self.memo()
        chunks = [values[i : i + 1000] for i in range(0, len(values), 1000)]
        return start + b"".join(
            b"(" + b"".join(self.any(value) for value in chunk) + b"e" for chunk in chunks
        )

    def dict(self, values):
        start = b"}" + self.memo() + b"("
        return start + b"".join(self.any(k) + self.any(v) for k, v in values.items()) + b"u"

    def name(self, module, name):
        return f"c{module}\n{name}\n".encode() + self.memo()

    def array(self, array, *, code=b"u1"):
        fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        return b"".join(
            (
                self.name("numpy.core.multiarray", "_reconstruct"),
                self.name("numpy", "ndarray"),
                b"K\x00\x85" + self.memo() + b"U\x01b" + self.memo() + b"\x87" + self.memo(),
                b"R" + self.memo(),
                b"(K\x01" + b"".join(self.int(n) for n in array.shape) + b"\x86" + self.memo(),
                self.name("numpy", "dtype") + self.text(code) + b"K\x00K\x01\x87" + self.memo(),
                b"R" + self.memo() + b"(K\x03U\x01|" + self.memo() + b"NNN",
                b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
                (b"\x88" if fortran else b"\x89") + self.text(array.tobytes("A")) + b"tb",
            )
        )


def cifar(count=300, *, labels=(b"labels",), order="C"):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
    return {
        b"batch_label": b"training batch 1 of 5",
        **{name: generator.integers(0, 100, count).tolist() for name in labels},
        b"data": np.asarray(images, order=order),
        b"filenames": [b"leptodactylus_pentadactylus_s_%06d.png" % i for i in range(count)],
    }


# A small example of each kind of value.
SMALL = {
    "data": np.arange(6, dtype=np.uint8).reshape(2, 3),
    "more": np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
    "labels": [1, 300, 70000, -1, 2**40],
    "rest": (b"raw", b"", "text é", 0.5, True, False, None, (), [], {}, (1,), (1, 2), (1, 2, 3, 4)),
}
STREAMS = [pickle.dumps(SMALL, protocol) for protocol in PROTOCOLS] + [
    Python2().file(cifar(2) | {b"data": np.ones((2, 4), np.uint8)}),
]


@pytest.mark.parametrize("labels", [(b"labels",), (b"fine_labels", b"coarse_labels")])
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_the_layout_of_cifar(labels, order):
    batch = cifar(labels=labels, order=order)
    data = Python2().file(batch)
    assert_same(read(data), batch)
    assert_same(read(data), pickle.loads(data, encoding="bytes"))


def test_large_integers_of_python_2():
    assert read(Python2().file([2**40, -(2**40), 70000])) == [2**40, -(2**40), 70000]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_are_those_of_pickle(protocol, order):
    array = np.asarray(np.arange(24, dtype=np.uint8).reshape(2, 3, 4), order=order)
    for one in (array, array[:0], array[:1, :1, 0], np.array(array[1, 1, 1])):
        data = pickle.dumps(one, protocol)
        assert_same(read(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data_is_that_of_pickle(protocol):
    shared = [1, 2]
    for value in (SMALL, [shared, (shared, shared)], [SMALL["data"]] * 2, list(range(3000))):
        data = pickle.dumps(value, protocol)
        assert_same(read(data), value)
        assert_same(read(pickletools.optimize(data)), value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_can_be_written_to(protocol):
    read_only = np.arange(3, dtype=np.uint8)
    read_only.flags.writeable = False
    for array in (np.arange(3, dtype=np.uint8), read_only):
        ours = read(pickle.dumps(array, protocol))
        ours += 1
        assert ours.tolist() == [1, 2, 3]


@settings(deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats()
        | st.text()
        | st.binary()
        | st.just((2, 3)).map(lambda shape: np.ones(shape, np.uint8)),
        lambda some: (
            st.lists(some) | st.tuples(some, some) | st.dictionaries(st.text(max_size=9), some)
        ),
        max_leaves=10,
    ),
    st.sampled_from(PROTOCOLS),
)
def test_any_plain_data_is_that_of_pickle(value, protocol):
    data = pickle.dumps(value, protocol)
    assert_same(read(data), pickle.loads(data))


# --- hostile files


class Calls:
    """Unpickle by calling a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Ordinary:
    pass


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"data": [x]}, lambda x: {x: 1}])
def test_a_function_is_named_and_not_called(protocol, wrap, tmp_path):
    canary = tmp_path / "canary"
    data = pickle.dumps(wrap(Calls(os.system, f"mkdir {canary}")), protocol)
    with pytest.raises(InputError) as refused:
        read(data)
    assert not canary.exists()
    if protocol >= 2:
        assert str(refused.value) == (
            f"data_batch_1: contains '{os.system.__module__}.system'; only numbers, text, lists, "
            "dictionaries and uint8 arrays are read from a pickle, and nothing is executed. Use "
            "the file of the official release."
        )
    pickle.loads(data)
    assert canary.exists()  # the file is really hostile


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (OrderedDict(a=1), "'collections.OrderedDict'"),
        (Ordinary(), "the instruction NEWOBJ"),
        (date(2020, 1, 1), "'datetime.date'"),
        (np.ma.zeros(3), "'numpy.ma"),
        (np.array([1, "a"], dtype=object), "an array of type 'O8'"),
        (np.array(["a"]), "an array of type 'U1'"),
        (np.zeros(2, "datetime64[s]"), "an array of type 'M8'"),
        (np.zeros(2, [("a", "u1")]), "an array of type 'V1'"),
        (np.dtype("u1"), "'numpy.dtype' outside an array"),
        (np.uint8(3), "multiarray.scalar'"),
        (np.ndarray, "'numpy.ndarray' outside an array"),
        ({1: 2}, "a dictionary whose keys are not short text"),
        ({(1,): 2}, "a dictionary whose keys are not short text"),
        ({"k" * 201: 2}, "a dictionary whose keys are not short text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_not_plain_are_named(value, found, protocol):
    with pytest.raises(
        InputError, match=r"data_batch_1: contains .*; only numbers, text"
    ) as refused:
        read(pickle.dumps(value, protocol))
    assert found in str(refused.value)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dtype", OTHER_DTYPES)
def test_only_arrays_of_uint8_are_read(protocol, dtype):
    code = np.dtype(dtype).str[1:]
    with pytest.raises(InputError, match=f"contains an array of type '{code}'"):
        read(pickle.dumps(np.ones((2, 3), dtype), protocol))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({1, 2}, "the instruction EMPTY_SET"),
        (frozenset([1]), "the instruction FROZENSET"),
        (bytearray(b"a"), "a value of type bytearray"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_only_newer_protocols_write(value, found):
    with pytest.raises(InputError) as refused:
        read(pickle.dumps(value, 5))
    assert found in str(refused.value)


def test_a_buffer_outside_the_file():
    buffers = []
    data = pickle.dumps(np.arange(5), 5, buffer_callback=buffers.append)
    with pytest.raises(InputError, match="the instruction NEXT_BUFFER"):
        read(data)


NDARRAY, DTYPE = b"cnumpy\nndarray\n", b"cnumpy\ndtype\n"
LONG = b"\x8b" + struct.pack("<i", 1_000_000) + b"\x7f" * 1_000_000


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (b"(iposix\nsystem\n", "the instruction INST 'posix system'"),
        (b"(iposix\n" + b"s" * 1000 + b"\n", "sssss…'"),
        (b"(" + NDARRAY + b"K\x01o", "the instruction OBJ"),
        (NDARRAY + b")\x81", "the instruction NEWOBJ"),
        (NDARRAY + b")}\x92", "the instruction NEWOBJ_EX"),
        (b"\x82\x01", "the instruction EXT1"),
        (b"\x83\x01\x00", "the instruction EXT2"),
        (b"\x84\x01\x00\x00\x00", "the instruction EXT4"),
        (b"Pname\n", "the instruction PERSID 'name'"),
        (b"K\x01Q", "the instruction BINPERSID"),
        (b"S'text'\n", "the instruction STRING 'text'"),
        (LONG, "the instruction LONG4"),
        (b"0", "the instruction POP"),
        (b"2", "the instruction DUP"),
        (NDARRAY + b"K\x03\x85R", "'numpy.ndarray' with unexpected arguments"),
        (DTYPE + b"U\x02u1K\x01K\x01\x87R", "'numpy.dtype' with unexpected arguments"),
        (b"c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R", "'_codecs.encode' with unexp"),
        (b"cnumpy.core.numeric\n_frombuffer\n)R", "_frombuffer' with unexpected arguments"),
        (b"c__builtin__\nbytes\nK\x09\x85R", "'__builtin__.bytes' with unexpected arguments"),
        (b"c__builtin__\neval\n", "'__builtin__.eval'"),
        (b"cnumpy\ncore.multiarray.evil\n", "'numpy.core.multiarray.evil'"),
        (b"cnumpy\n\xc3\xa9\n", "is damaged ("),
        (b"]}b", "is damaged ("),
        (NDARRAY + b"}b", "a changed 'numpy.ndarray'"),
        (NDARRAY + b"N}U\x08functionNs\x86b", "a changed 'numpy.ndarray'"),
    ],
)
def test_instructions_that_create_objects(program, found):
    with pytest.raises(InputError) as refused:
        read(b"\x80\x02" + program + b".")
    assert found in str(refused.value)
    assert len(str(refused.value)) < 400


# --- damaged files


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"K\x01", "pickle exhausted before seeing STOP"),
        (b"<html>", "opcode b'<' unknown"),
        (b".", "UnpicklingError: "),
        (b"K\x01.K\x01.", "there is data after the end of the pickle"),
        (b"h\x05.", "Memo value not found at index 5"),
        (b"q\x05.", "UnpicklingError: "),
        (b"\x94.", "UnpicklingError: "),
        (b"K\x01\x86.", "UnpicklingError: "),
        (b"K\x01(\x85.", "UnpicklingError: "),
        (b"R.", "UnpicklingError: "),
        (b"K\x01b.", "UnpicklingError: "),
        (b"\x93.", "UnpicklingError: "),
        (b"t.", "UnpicklingError: "),
        (b"K\x01K\x02a.", "AttributeError: "),
        (b"](K\x01u.", "UnpicklingError: odd number of items"),
        (b"}(U\x01au.", "UnpicklingError: odd number of items"),
        (b"}]Ns.", "TypeError: unhashable type"),
        (b"K\x01)R.", "TypeError: 'int' object is not callable"),
        (b"K\x01K\x02\x93.", "UnpicklingError: STACK_GLOBAL requires str"),
        (b"T\xff\xff\xff\x7fabc.", "expected 2147483647 bytes in a string4, but only 4 remain"),
        (b"T\xff\xff\xff\xffabc.", "string4 byte count < 0"),
        (b"\x8e" + b"\xff" * 7 + b"\x7fabc.", "but only 4 remain"),
        (b"\x96" + b"\xff" * 7 + b"\x7fabc.", "but only 4 remain"),
        (b"\x8d" + b"\xff" * 8 + b"abc.", "byte count > sys.maxsize"),
        (b"\x8b\xff\xff\xff\x7fabc.", "not enough data in stream to read long4"),
        (b"X\x01\0\0\0\xff.", "can't decode byte 0xff"),
        (b"S'\\q'\n.", ""),  # Python warns about the escape
        (b"I" + b"9" * 100_000 + b"\n.", "4300 digits"),
        (b"Ix\n.", "invalid literal"),
        (b"F" + b"x" * 100_000 + b"\n.", "could not convert string to float"),
        (
            b"c_codecs\nencode\nX\x03\0\0\0\xe2\x82\xacX\x06\0\0\0latin1\x86R.",
            "UnicodeEncodeError: ",
        ),
    ],
)
def test_invalid_instructions_are_damage(program, reason):
    with pytest.raises(InputError) as refused:
        read(program)
    assert reason in str(refused.value)
    if reason:
        assert str(refused.value).startswith("data_batch_1: the content is damaged (")
        assert str(refused.value).endswith("); download it again.")
    assert len(str(refused.value)) < 400


def array_stream(
    *, shape=b"K\x02K\x03\x86", order=b"U\x01|", code=b"U\x02u1", raw=b"U\x06abcdef", end=b"b."
):
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        + (b"(K\x01" + shape + DTYPE + code + b"K\x00K\x01\x87R")
        + (b"(K\x03" + order + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
        + (b"\x89" + raw + b"t" + end)
    )


def test_the_array_to_be_damaged_is_intact():
    assert read(array_stream()).tolist() == [[97, 98, 99], [100, 101, 102]]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"raw": b"U\x05abcde"}, "invalid shape for its 5 bytes"),
        ({"raw": b"U\x07abcdefg"}, "invalid shape for its 7 bytes"),
        ({"code": b"U\x02u2"}, "an array of type 'u2'"),
        ({"code": b"U\x03f16"}, "an array of type 'f16'"),
        ({"code": b"U\x02b1"}, "an array of type 'b1'"),
        ({"code": b"U\x01O"}, "an array of type 'O'"),
        ({"order": b"U\x01!"}, "'numpy.dtype' with an unexpected state"),
        ({"order": b"U\x01>"}, "'numpy.dtype' with an unexpected state"),
        ({"order": b"U\x03<u1"}, "'numpy.dtype' with an unexpected state"),
        ({"shape": b"J\xfe\xff\xff\xffJ\xfd\xff\xff\xff\x86"}, "invalid shape"),
        ({"shape": b"\x88K\x06\x86"}, "invalid shape"),
        ({"shape": b"NK\x06\x86"}, "invalid shape"),
        ({"shape": b"\x8a\x09" + b"\xff" * 8 + b"\0\x85"}, "an integer has more than 64 bits"),
        ({"shape": b"K\x00" + LONG + b"\x86"}, "the instruction LONG4"),
        ({"shape": b"(K\x06" + b"K\x01" * 40 + b"t"}, "invalid shape"),
        (
            {
                "shape": b"K\x00" + (b"\x8a\x08" + b"\xff" * 7 + b"\x7f") * 2 + b"\x87",
                "raw": b"U\0",
            },
            "is damaged",
        ),
        ({"end": b"0."}, "the instruction POP"),
        ({"end": b"\x86."}, "an array has no content"),
        ({"end": b"q\x01bh\x01b."}, "is damaged"),
        ({"end": b"b" + DTYPE + b"b."}, "'numpy.ndarray' with an unexpected state"),
        ({"raw": b"X\x06\0\0\0abcdef"}, "'numpy.ndarray' with an unexpected state"),
        ({"shape": b"]"}, "'numpy.ndarray' with an unexpected state"),
        ({"raw": b"]"}, "'numpy.ndarray' with an unexpected state"),
    ],
)
def test_an_inconsistent_array(parts, reason):
    with pytest.raises(InputError, match=reason):
        read(array_stream(**parts))


@pytest.mark.parametrize(
    "program",
    [
        b"]" * 50_000 + b"a" * 49_999,
        b")" + b"\x85" * 50_000,
        b"(" * 50_000 + b"t" * 50_000,
        b"]q\x00h\x00a",  # a list that holds itself
        b"}q\x00U\x01kh\x00s",
        b")" + b"q\x00h\x00\x86" * 10_000,  # 2^10000 empty tuples
        b"}" + b")" + b"q\x00h\x00\x86" * 40 + b"Ns",  # the same as a key, which is hashed
        b"}" + b")" + b"\x85q\x00(uq\x00h\x00\x86" * 40 + b"Ns",
        b"}" + b")" + b"\x85" * 500_000 + b"Ns",
    ],
)
def test_deep_nesting_is_damage(program):
    with pytest.raises(InputError, match="is damaged"):
        read(program + b".")


def test_shared_values_are_visited_once():
    value = []
    for _ in range(14):
        value = [value] * 100
    assert read(pickle.dumps(value, 2))[0][0] is not None
    with pytest.raises(InputError, match="values are nested more than 16 levels deep"):
        read(pickle.dumps([[value]], 2))


def test_too_many_instructions():
    with pytest.raises(InputError, match="it has more than 1,000,000 instructions"):
        read(b"N" * 1_000_001)


def test_an_array_cannot_be_multiplied_by_repeating_its_data():
    """Each repetition takes 40 bytes in the file, and would take a megabyte of memory."""
    text = "x" * 2**20
    encoded = b"c_codecs\nencode\nq\x00X" + struct.pack("<I", len(text)) + text.encode() + b"q\x01"
    again = b"h\x00h\x01X\x06\0\0\0latin1\x86R"
    program = b"](" + encoded + b"X\x06\0\0\0latin1\x86R" + again * 900 + b"e."
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="its arrays are larger than the file"):
            read(program)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


def test_a_large_memo_index_is_not_allocated():
    with pytest.raises(InputError, match="it has a memo index above 1,000,000"):
        read(b"Nr\xff\xff\xff\x7f.")


def test_keys_with_equal_hashes_are_rejected():
    """Python hashes integers modulo 2^61 - 1."""
    keys = [(2**61 - 1) * i for i in range(1, 1000)]
    with pytest.raises(InputError, match="an integer has more than 64 bits"):
        read(pickle.dumps(dict.fromkeys(keys), 2))


def test_a_declared_length_is_not_allocated():
    tracemalloc.start()
    try:
        for code in (
            b"T\xff\xff\xff\x7f",
            b"\x96" + b"\xff" * 6 + b"\0\0",
            b"\x8b\xff\xff\xff\x7f",
        ):
            with pytest.raises(InputError, match="is damaged"):
                read(code + b"abc.")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stream", STREAMS)
def test_a_file_that_ends_early_is_damaged(stream):
    for length in range(len(stream)):
        with pytest.raises(InputError, match="data_batch_1: the content is damaged"):
            read(stream[:length])
    assert_plain(read(stream))


def assert_value_or_input_error(data):
    try:
        value = read(data)
    except InputError:
        return
    assert_plain(value)


@settings(deadline=None)
@given(st.binary())
def test_random_bytes_give_a_value_or_an_input_error(data):
    assert_value_or_input_error(data)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(STREAMS), st.data())
def test_a_changed_byte_gives_a_value_or_an_input_error(stream, data):
    position = data.draw(st.integers(0, len(stream) - 1))
    byte = data.draw(st.integers(0, 255))
    assert_value_or_input_error(stream[:position] + bytes([byte]) + stream[position + 1 :])


def pieces(stream):
    """The instructions of a stream, each with its argument."""
    starts = [position for _, _, position in pickletools.genops(stream)]
    return [stream[a:b] for a, b in zip(starts, [*starts[1:], len(stream)], strict=True)]


PIECES = sorted({piece for stream in [*STREAMS, array_stream()] for piece in pieces(stream)})


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(PIECES)))
def test_any_sequence_of_instructions_gives_a_value_or_an_input_error(program):
    assert_value_or_input_error(b"".join(program) + b".")


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*STREAMS, array_stream()]), st.data())
def test_exchanged_instructions_give_a_value_or_an_input_error(stream, data):
    program = pieces(stream)
    for _ in range(data.draw(st.integers(1, 3))):
        program[data.draw(st.integers(0, len(program) - 1))] = data.draw(st.sampled_from(PIECES))
    assert_value_or_input_error(b"".join(program))
