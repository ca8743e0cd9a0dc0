"""Plain data out of a pickle, without running it.

Unpickling calls whatever functions the file names, so a pickle from elsewhere is a program from
elsewhere. Here its instructions are followed by a machine that can build numbers, text, lists,
tuples, dictionaries and NumPy arrays of numbers, and nothing else.
"""

import math
import pickletools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probmask.errors import InputError

# Bounds on what a crafted file can cost. CIFAR-100 takes 200,000 instructions and two levels.
_MOST_INSTRUCTIONS = 1_000_000
_DEEPEST = 16
_LONGEST_KEY = 200
_MOST_DIMENSIONS = 32

# The names that NumPy arrays and bytes are pickled with, as of NumPy 1 and Python 2.
_KNOWN_NAMES = {
    "__builtin__.bytes",
    "_codecs.encode",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.core.numeric._frombuffer",
    "numpy.dtype",
    "numpy.ndarray",
}
_DTYPES = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
_PLAIN_TYPES = (bytes, str, int, float, type(None), np.ndarray, np.generic)


def read_pickle(data: bytes, *, source: str) -> Any:
    """Return the plain data that the pickle holds, or refuse it; nothing in it is ever run.

    Text that Python 2 wrote comes out as bytes. ``source`` is what messages call the file.
    """
    try:
        return _plain(_Machine(len(data)).run(_instructions(data)))
    except _DamagedError as error:
        raise InputError(f"{source} is damaged: {error}; download it again.") from error
    except _ForeignError as error:
        raise InputError(
            f"{source}: found {error}, but only plain arrays, numbers, text, lists and "
            "dictionaries are read from a pickle, and nothing in it is run; take the file from "
            "the official release."
        ) from error


class _DamagedError(Exception):
    """The instructions make no sense."""


class _ForeignError(Exception):
    """The instructions may make sense, but are not about plain data."""


@dataclass(frozen=True)
class _Name:
    """The name of a function or class: inert, as only the machine knows what it stands for."""

    name: str


@dataclass(eq=False, kw_only=True)
class _Unfinished:
    """What has been announced, but gets its content from a later BUILD."""

    finished: Any = None


class _Array(_Unfinished):
    """An unfinished array."""


@dataclass(eq=False, kw_only=True)
class _Dtype(_Unfinished):
    """An unfinished type of numbers: all but the byte order is known."""

    code: str


Instruction = tuple[str, Any]


def _instructions(data: bytes) -> Iterator[Instruction]:
    """The name and the argument of each instruction, the last of them STOP."""
    operations = pickletools.genops(data)
    for _ in range(_MOST_INSTRUCTIONS):
        try:
            opcode, argument, position = next(operations)
        except (ValueError, Warning) as error:  # a bad escape in text is but a warning
            raise _DamagedError(_shortened(str(error))) from error
        if opcode.name == "STOP" and position != len(data) - 1:
            raise _DamagedError("there is more after its end")
        yield opcode.name, argument
        if opcode.name == "STOP":
            return
    raise _DamagedError(f"it has more than {_MOST_INSTRUCTIONS:,} instructions")


class _Machine:
    """The stack, the marks in it and the memo on which a pickle's instructions work.

    Everything that is built takes memory in proportion to the file: a few bytes that are turned
    into an array time and again are refused.
    """

    def __init__(self, size: int) -> None:
        self._stack: list[Any] = []
        self._below_mark: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        # Twice: once for bytes that are stored as text, once for the array that is made of them.
        self._room = 2 * size

    def run(self, instructions: Iterable[Instruction]) -> Any:
        """Follow the instructions up to STOP and return what they leave on the stack."""
        for name, argument in instructions:
            if name not in _METHODS:
                shown = f" {_shortened(argument)!r}" if isinstance(argument, str) else ""
                raise _ForeignError(f"the instruction {name}{shown}")
            _METHODS[name](self, argument)
        if len(self._stack) != 1 or self._below_mark:
            raise _DamagedError("it does not end with one value")
        return self._stack.pop()

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the topmost value off the stack."""
        self._top()
        return self._stack.pop()

    def pop_pair(self) -> list[Any]:
        """Take two values off the stack, in the order they were pushed."""
        last, first = self.pop(), self.pop()
        return [first, last]

    def pop_series(self) -> list[Any]:
        """Take the values since the last mark off the stack."""
        if not self._below_mark:
            raise _DamagedError("a series of values has no beginning")
        series, self._stack = self._stack, self._below_mark.pop()
        return series

    def mark(self, _: None) -> None:
        """Begin a series of values."""
        self._below_mark.append(self._stack)
        self._stack = []

    def put(self, index: int) -> None:
        """Remember the topmost value."""
        self._memo[index] = self._top()

    def memoize(self, _: None) -> None:
        """Remember the topmost value under the next free index."""
        self.put(len(self._memo))

    def get(self, index: int) -> None:
        """Push a value remembered earlier."""
        if index not in self._memo:
            raise _DamagedError(f"it refers to value {index}, which is not there")
        value = self._memo[index]
        finished = value.finished if isinstance(value, _Unfinished) else None
        self.push(value if finished is None else finished)

    def tuple_of_series(self, _: None) -> None:
        """Replace the series by a tuple of it."""
        self.push(tuple(self.pop_series()))

    def tuple_of(self, count: int) -> None:
        """Replace the topmost values by a tuple of them."""
        values = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(values)))

    def append(self, values: list[Any]) -> None:
        """Append to the topmost list."""
        target = self._top()
        if type(target) is not list:
            raise _DamagedError("it appends to what is not a list")
        target.extend(values)

    def set_items(self, series: list[Any]) -> None:
        """Add keys and values, in turn, to the topmost dictionary."""
        target = self._top()
        if type(target) is not dict or len(series) % 2:
            raise _DamagedError("it adds keys and values that do not pair to a dictionary")
        keys = series[::2]
        if not all(_is_key(key) for key in keys):
            raise _ForeignError("a dictionary whose keys are not short text")
        target.update(zip(keys, series[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        """Push a name, if it is one that arrays are pickled with."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise _DamagedError("it names something by what is not text")
        full = f"{module}.{name}"
        canonical = full.replace("numpy._core.", "numpy.core.", 1)
        if canonical not in _KNOWN_NAMES:
            raise _ForeignError(f"{_shortened(full)!r}")
        self.push(_Name(canonical))

    def reduce(self, _: None) -> None:
        """Replace a function and its arguments by the result, if it is about plain arrays."""
        arguments, function = self.pop(), self.pop()
        # Class patterns throughout: an array compared with a literal has no truth value.
        match function, arguments:
            case _Name("__builtin__.bytes"), ():
                self.push(b"")
            case _Name("_codecs.encode"), (str(text), str("latin1")):
                self.push(self._encoded(text))
            case _Name("numpy.dtype"), (str() | bytes() as code, int(0), int(1)):
                self.push(_Dtype(code=_checked_code(code)))
            case (
                _Name("numpy.core.multiarray._reconstruct"),
                (_Name("numpy.ndarray"), (int(0),), str("b") | bytes(b"b")),
            ):
                self.push(_Array())
            case _Name("numpy.core.multiarray.scalar"), (np.dtype() as dtype, bytes(raw)):
                self.push(self._array(raw, dtype, (), "C")[()])
            case (
                _Name("numpy.core.numeric._frombuffer"),
                (bytes() | bytearray() as raw, np.dtype() as dtype, tuple(shape), str(order)),
            ) if order in ("C", "F"):
                self.push(self._array(raw, dtype, shape, order))
            case _Name(name), _:
                raise _ForeignError(f"{name!r} with other arguments than plain arrays have")
            case _:
                raise _DamagedError("it calls what is not a function")

    def build(self, _: None) -> None:
        """Give the topmost array or dtype its content."""
        state, target = self.pop(), self._top()
        match target, state:
            case (
                _Array(finished=None),
                (int(1), tuple(shape), np.dtype() as dtype, int(fortran), bytes(raw)),
            ):
                target.finished = self._array(raw, dtype, shape, "F" if fortran else "C")
            case (
                _Dtype(finished=None, code=code),
                (int(3), str() | bytes() as order, None, None, None, int(-1), int(-1), int(0)),
            ):
                target.finished = _ordered(code, order)
            case _:
                raise _ForeignError("the instruction BUILD on something else than a plain array")
        self._stack[-1] = target.finished

    def _array(
        self, raw: bytes | bytearray, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any
    ) -> npt.NDArray[Any]:
        """A writable array, in the machine's byte order, of exactly the raw data."""
        # Checked before they are multiplied: whole numbers in a pickle can be megabytes long.
        if len(shape) > _MOST_DIMENSIONS or not all(_is_length(length) for length in shape):
            raise _DamagedError("the shape of an array is not one")
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise _DamagedError(
                f"an array of shape {shape} and type {dtype} has {len(raw):,} bytes of data"
            )
        if dtype.kind == "b" and raw.translate(None, b"\0\1"):
            raise _DamagedError("an array of truth values holds others than 0 and 1")
        self._take(len(raw))
        try:
            return np.ndarray(shape, dtype, raw, order=order).astype(dtype.newbyteorder("="))
        except ValueError as error:  # empty, and of enormous shape
            raise _DamagedError(f"an array has the shape {shape}") from error

    def _encoded(self, text: str) -> bytes:
        """The bytes that Python 3 stores as text where the protocol has no bytes."""
        self._take(len(text))
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError as error:
            raise _DamagedError("bytes are stored as text that is not Latin-1") from error

    def _take(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            raise _DamagedError("its arrays hold more than the file does")

    def _top(self) -> Any:
        if not self._stack:
            raise _DamagedError("an instruction lacks its operands")
        return self._stack[-1]


_METHODS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda _machine, _protocol: None,
    "FRAME": lambda _machine, _length: None,
    "STOP": lambda _machine, _: None,
    "NONE": _Machine.push,  # its argument is None, too
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "INT": _Machine.push,
    "BININT": _Machine.push,
    "BININT1": _Machine.push,
    "BININT2": _Machine.push,
    "LONG1": _Machine.push,
    "LONG4": _Machine.push,
    "BINFLOAT": _Machine.push,
    # Python 2's text, which pickletools decodes as Latin-1, is bytes.
    "SHORT_BINSTRING": lambda machine, text: machine.push(text.encode("latin-1")),
    "BINSTRING": lambda machine, text: machine.push(text.encode("latin-1")),
    "SHORT_BINBYTES": _Machine.push,
    "BINBYTES": _Machine.push,
    "BINBYTES8": _Machine.push,
    "BYTEARRAY8": _Machine.push,
    "SHORT_BINUNICODE": _Machine.push,
    "BINUNICODE": _Machine.push,
    "BINUNICODE8": _Machine.push,
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "MARK": _Machine.mark,
    "TUPLE": _Machine.tuple_of_series,
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_series()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop_pair()),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_series()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.memoize,
    "BINGET": _Machine.get,
    "LONG_BINGET": _Machine.get,
    "GLOBAL": lambda machine, names: machine.name(*names.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.pop_pair()),
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}


def _plain(value: Any) -> Any:
    """Return the value, or refuse it if it holds what is not plain, or holds it too deep."""
    level = [value]
    for _ in range(_DEEPEST):
        # Each value once: what is shared within shared values would be seen exponentially often.
        level = list({id(part): part for whole in level for part in _parts(whole)}.values())
        if not level:
            return value
    raise _DamagedError(f"values are nested more than {_DEEPEST} deep")


def _parts(value: Any) -> Iterable[Any]:
    """What a container holds; nothing, if the value is plain itself."""
    match value:
        case dict():
            return value.values()  # the keys are known to be text
        case list() | tuple():
            return value
        case _Name(name):
            raise _ForeignError(f"{name!r} outside an array")
        case _Unfinished():
            raise _DamagedError("an array lacks its content")
        case _ if isinstance(value, _PLAIN_TYPES):
            return ()
    raise _ForeignError(f"a value of type {type(value).__name__}")


def _checked_code(code: str | bytes) -> str:
    """NumPy's code of a type of plain numbers, such as ``u1``."""
    text = _as_text(code)
    if text not in _DTYPES:
        raise _ForeignError(f"an array of type {_shortened(text)!r}")
    return text


def _ordered(code: str, order: str | bytes) -> np.dtype[Any]:
    """The dtype of a code and a byte order."""
    text = _as_text(order)
    if text not in ("<", ">", "|"):
        raise _DamagedError("the numbers of an array have no byte order")
    return np.dtype(text + code)


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_key(value: Any) -> bool:
    # Other types can be made to take forever to hash or to collide, and long text to compare.
    return type(value) in (str, bytes) and len(value) <= _LONGEST_KEY


def _as_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}…"
