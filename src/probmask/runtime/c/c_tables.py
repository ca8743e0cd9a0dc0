"""Arrays and structures as C source."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

# Numbers per line of an array.
_PER_LINE = 16
_FORMATS = {"float": "%.9g", "int32_t": "%d", "int16_t": "%d", "signed char": "%d"}


class Tables:
    """Constant arrays, each written once however often it is used."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[str, bytes], str] = {}

    def comment(self, text: str) -> None:
        """Start a section."""
        self.lines.append(f"\n/* {as_comment(text)} */")

    def array(self, kind: str, name: str, numbers: npt.NDArray[Any]) -> str:
        """Define an array of a C type, unless an equal one exists; return its name."""
        key = kind, numbers.tobytes()
        if key not in self._names:
            self._names[key] = name
            self.lines.append(f"static const {kind} {name}[] = {{\n{_numbers(kind, numbers)}\n}};")
        return self._names[key]

    def offsets(self, name: str, numbers: npt.NDArray[Any]) -> tuple[str, int]:
        """Define offsets as 16-bit integers if they fit; return their name and whether not."""
        fits = not len(numbers) or (numbers.min() >= -(2**15) and numbers.max() < 2**15)
        return self.array("int16_t" if fits else "int32_t", name, numbers), int(not fits)

    def structure(self, kind: str, name: str, members: Mapping[str, Any]) -> str:
        """Define a constant structure; return its name."""
        text = ", ".join(f".{key} = {_value(value)}" for key, value in members.items())
        self.lines.append(f"static const struct {kind} {name} = {{{_wrapped(text)}}};")
        return name


def as_comment(text: str) -> str:
    """Return a text that does not end the comment that it stands in."""
    return "".join(c if c.isprintable() else " " for c in text).replace("*/", "* /")


def number(value: float) -> str:
    """Return a float as C source."""
    if np.isinf(value):
        return "PM_INFINITY" if value > 0 else "-PM_INFINITY"
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if re.search(r"[.e]", text) else f"{text}.0f"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "{" + ", ".join(f".{key} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "{" + ", ".join(map(_value, value)) + "}"
    return number(value) if isinstance(value, float) else str(int(value))


def _numbers(kind: str, numbers: npt.NDArray[Any]) -> str:
    """Return the initializers of an array. Nine digits identify a float."""
    if not len(numbers):
        return "    0"  # C has no empty arrays
    line = "    " + ", ".join([_FORMATS[kind]] * _PER_LINE) + ",\n"
    whole, rest = divmod(len(numbers), _PER_LINE)
    last = "    " + ", ".join([_FORMATS[kind]] * rest) if rest else ""
    text = (line * whole + last) % tuple(numbers.tolist())
    if kind == "float":
        text = re.sub(r"\binf\b", "PM_INFINITY", text).replace("nan", "PM_NAN")
    return text.rstrip(",\n")


def _wrapped(text: str, width: int = 96) -> str:
    """Break the members of a structure into lines."""
    lines, line = [], "    "
    for member in text.split(", ."):
        member = member if member.startswith(".") else f".{member}"
        if len(line) + len(member) > width:
            lines.append(line.rstrip())
            line = "    "
        line += f"{member}, "
    return "\n" + "\n".join([*lines, line.rstrip(", ")]) + "\n"
