"""Read the pickles of CIFAR's Python release without executing what they contain.

Unpickling can call any function that the file names. `read_pickle` therefore checks the
instructions of the file first, and then runs a `pickle.Unpickler` that knows only the few globals
of a pickled NumPy array. Even these are replaced by functions of this file, which accept nothing
but uint8 arrays. No library offers this check for NumPy pickles, so this file implements it.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from probmask.data.releases import damaged
from probmask.errors import InputError

# Limits on what a crafted file can cost. CIFAR-100 has 200,000 instructions, ten tuples and three
# levels of nesting.
_MAX_INSTRUCTIONS = 1_000_000
_MAX_TUPLES = 1_000
_MAX_DEPTH = 16
_MAX_KEY_LENGTH = 200
_MAX_DIMENSIONS = 32

_TUPLES = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
_PUTS = frozenset(("BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("BINGET", "LONG_BINGET"))
# These leave an earlier value on top of the stack, which may be a tuple.
_UPDATES = frozenset(("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"))
# The instructions that Python 2 and 3 write for numbers, text, lists, dictionaries and arrays.
_INSTRUCTIONS = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", *_PUTS, *_GETS),
        *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG1"),
        *("BINFLOAT", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
        *("BYTEARRAY8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE", *_TUPLES),
        *("EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL", "REDUCE", *_UPDATES),
    )
)


def read_pickle(data: bytes, *, source: str) -> Any:
    """Return the numbers, text, lists, tuples, dictionaries and uint8 arrays of a pickle.

    Nothing in the pickle is imported or called. Strings that Python 2 wrote are returned as bytes.

    Args:
        data: Content of the file.
        source: Name of the file, for errors.

    Raises:
        InputError: If the pickle is damaged, too large, or contains anything else.
    """
    try:
        _check_instructions(data)
        return _plain(_ArrayUnpickler(data).load(), depth=1, seen={})
    except _ForeignError as error:
        raise InputError(
            f"{source}: contains {error}; only numbers, text, lists, dictionaries and uint8 arrays "
            "are read from a pickle, and nothing is executed. Use the file of the official release."
        ) from error
    except _DamagedError as error:
        raise damaged(source, str(error)) from error
    except Exception as error:  # the unpickler raises nearly any exception for a damaged file
        raise damaged(source, _shortened(f"{type(error).__name__}: {error}")) from error


class _ForeignError(Exception):
    """The pickle contains something other than plain data."""


class _DamagedError(Exception):
    """The pickle is inconsistent or exceeds a limit."""


def _check_instructions(data: bytes) -> None:
    """Reject instructions that create objects, and what could exhaust memory or time.

    `pickletools.genops` parses the instructions without executing them. It rejects lengths beyond
    the end of the file, which the unpickler would allocate.
    """
    limits = _Limits()
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name not in _INSTRUCTIONS:
            shown = f" {_shortened(argument)!r}" if isinstance(argument, str) else ""
            raise _ForeignError(f"the instruction {opcode.name}{shown}")
        limits.check(opcode.name, argument)
        if opcode.name == "STOP" and position != len(data) - 1:
            raise _DamagedError("there is data after the end of the pickle")


class _Limits:
    """Limits on what the instructions cost, followed one by one.

    - The unpickler allocates a memo of the largest index.
    - Integers of more than 64 bits can have equal hashes, and make dictionaries slow.
    - Hashing a dictionary key of deeply nested tuples would overflow the stack. If tuples could be
      used twice, it could take exponential time.
    """

    def __init__(self) -> None:
        self._instructions = 0
        self._tuples = 0
        self._memo: set[int] = set()
        self._tuples_in_memo: set[int] = set()
        self._tuple_on_top = False  # whether the value on top of the stack may be a tuple

    def check(self, name: str, argument: Any) -> None:
        """Raise _DamagedError if the next instruction exceeds a limit."""
        self._instructions += 1
        self._tuples += name in _TUPLES
        if name in _PUTS:
            argument = len(self._memo) if name == "MEMOIZE" else argument
            self._put(argument)
        elif name not in ("PROTO", "FRAME"):
            self._tuple_on_top = name in _TUPLES or name in _UPDATES
        if self._instructions > _MAX_INSTRUCTIONS:
            raise _DamagedError(f"it has more than {_MAX_INSTRUCTIONS:,} instructions")
        if self._tuples > _MAX_TUPLES:
            raise _DamagedError(f"it has more than {_MAX_TUPLES:,} tuples")
        if type(argument) is int and not -(2**63) <= argument < 2**63:
            raise _DamagedError("an integer has more than 64 bits")
        if name in _GETS and argument in self._tuples_in_memo:
            raise _DamagedError("a tuple is used twice")

    def _put(self, index: int) -> None:
        if index > _MAX_INSTRUCTIONS:
            raise _DamagedError(f"it has a memo index above {_MAX_INSTRUCTIONS:,}")
        self._memo.add(index)
        if self._tuple_on_top:
            self._tuples_in_memo.add(index)
        else:
            self._tuples_in_memo.discard(index)


@dataclass(frozen=True, slots=True)
class _Global:
    """A callable of the allow-list, which the pickle cannot change."""

    name: str
    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _ForeignError(f"a changed {self.name!r}")


@dataclass(eq=False, slots=True)
class _Dtype:
    """The dtype uint8; complete once its state is set."""

    complete: bool = False

    def __setstate__(self, state: Any) -> None:
        match state:
            case (3, "|" | b"|", None, None, None, -1, -1, 0) if not self.complete:
                self.complete = True
            case _:
                raise _ForeignError("'numpy.dtype' with an unexpected state")


@dataclass(eq=False, slots=True)
class _Array:
    """An array, whose content may be set by a later state."""

    build: Callable[..., npt.NDArray[np.uint8]]
    content: npt.NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        match state:
            case (1, tuple(shape), _Dtype(complete=True), int(fortran), bytes(raw)) if (
                self.content is None
            ):
                self.content = self.build(raw, shape, "F" if fortran else "C")
            case _:
                raise _ForeignError("'numpy.ndarray' with an unexpected state")


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler with an allow-list of globals: those of uint8 arrays and of bytes.

    The memory of everything it builds is proportional to the size of the file. A file that turns
    the same bytes into arrays repeatedly is rejected.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        # Twice the file: once for bytes that are stored as text, once for the array made of them.
        self._free_memory = 2 * len(data)
        functions = {
            "__builtin__.bytes": self._bytes,
            "_codecs.encode": self._encode,
            "numpy.core.multiarray._reconstruct": self._reconstruct,
            "numpy.core.numeric._frombuffer": self._frombuffer,
            "numpy.dtype": self._dtype,
            "numpy.ndarray": self._ndarray,
        }
        self._globals = {name: _Global(name, call) for name, call in functions.items()}

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of an allowed global; nothing is imported."""
        full_name = f"{module}.{name}"
        # NumPy 2 renamed numpy.core to numpy._core.
        known = self._globals.get(full_name.replace("numpy._core.", "numpy.core.", 1))
        if known is None:
            raise _ForeignError(f"{_shortened(full_name)!r}")
        return known

    def _bytes(self, *arguments: Any) -> bytes:
        if arguments:
            raise _unexpected_arguments("__builtin__.bytes")
        return b""

    def _encode(self, *arguments: Any) -> bytes:
        """Return the bytes that Python 3 stores as text where the protocol has no bytes."""
        match arguments:
            case (str(text), "latin1"):
                self._use_memory(len(text))
                return text.encode("latin-1")
        raise _unexpected_arguments("_codecs.encode")

    def _dtype(self, *arguments: Any) -> _Dtype:
        match arguments:
            case ("u1" | b"u1", 0, 1):
                return _Dtype()
            case (str() | bytes() as code, 0, 1):
                text = code if isinstance(code, str) else code.decode("latin-1")
                raise _ForeignError(f"an array of type {_shortened(text)!r}")
        raise _unexpected_arguments("numpy.dtype")

    def _ndarray(self, *arguments: Any) -> Any:
        raise _unexpected_arguments("numpy.ndarray")

    def _reconstruct(self, *arguments: Any) -> _Array:
        match arguments:
            case (_Global("numpy.ndarray"), (0,), "b" | b"b"):
                return _Array(self._build)
        raise _unexpected_arguments("numpy.core.multiarray._reconstruct")

    def _frombuffer(self, *arguments: Any) -> _Array:
        match arguments:
            case (
                bytes() | bytearray() as raw,
                _Dtype(complete=True),
                tuple(shape),
                "C" | "F" as order,
            ):
                return _Array(self._build, self._build(raw, shape, order))
        raise _unexpected_arguments("numpy.core.numeric._frombuffer")

    def _build(
        self, raw: bytes | bytearray, shape: tuple[Any, ...], order: Literal["C", "F"]
    ) -> npt.NDArray[np.uint8]:
        """Return a writable array of exactly the raw data."""
        valid = len(shape) <= _MAX_DIMENSIONS and all(
            type(length) is int and length >= 0 for length in shape
        )
        if not valid or math.prod(shape) != len(raw):
            raise _DamagedError(f"an array has an invalid shape for its {len(raw):,} bytes")
        self._use_memory(len(raw))
        return np.ndarray(shape, np.uint8, raw, order=order).copy(order="K")

    def _use_memory(self, size: int) -> None:
        self._free_memory -= size
        if self._free_memory < 0:
            raise _DamagedError("its arrays are larger than the file")


def _unexpected_arguments(name: str) -> _ForeignError:
    return _ForeignError(f"{name!r} with unexpected arguments")


def _plain(value: Any, *, depth: int, seen: dict[int, Any]) -> Any:
    """Return the value with arrays in place of `_Array`; reject all other objects.

    `seen` has the results by the id of the value, so that shared values are visited once.
    """
    if value is None or type(value) in (bytes, str, int, float, bool):
        return value
    if isinstance(value, _Array):
        if value.content is None:
            raise _DamagedError("an array has no content")
        return value.content
    if depth > _MAX_DEPTH:
        raise _DamagedError(f"values are nested more than {_MAX_DEPTH} levels deep")
    if id(value) not in seen:
        seen[id(value)] = _plain_container(value, depth=depth, seen=seen)
    return seen[id(value)]


def _plain_container(value: Any, *, depth: int, seen: dict[int, Any]) -> Any:
    match value:
        case dict():
            if not all(_is_short_text(key) for key in value):
                raise _ForeignError("a dictionary whose keys are not short text")
            return {key: _plain(part, depth=depth + 1, seen=seen) for key, part in value.items()}
        case list():
            return [_plain(part, depth=depth + 1, seen=seen) for part in value]
        case tuple():
            return tuple([_plain(part, depth=depth + 1, seen=seen) for part in value])
        case _Global(name):
            raise _ForeignError(f"{name!r} outside an array")
        case _Dtype():
            raise _ForeignError("'numpy.dtype' outside an array")
    raise _ForeignError(f"a value of type {type(value).__name__}")


def _is_short_text(key: Any) -> bool:
    return type(key) in (str, bytes) and len(key) <= _MAX_KEY_LENGTH


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:100]}…"
