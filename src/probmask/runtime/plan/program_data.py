"""The arrays that a program's operations refer to by offset."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt


class Data:
    """Arrays that operations refer to by offset: weights, windows, constants, position bits."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {k: [] for k in ("longs", "constants", "position_bits")}
        self.sizes: Counter[str] = Counter()
        self.offsets: list[npt.NDArray[np.int32]] = []
        self.values: list[npt.NDArray[np.float32]] = []
        self.weights = 0

    def add(self, kind: str, numbers: Any) -> int:
        """Append numbers to the array of a kind; return their offset."""
        offset = self.sizes[kind]
        self.parts[kind].append(numbers)
        self.sizes[kind] += len(numbers)
        return offset

    def add_weights(self, offsets: Any, values: Any) -> int:
        """Append the non-zero weights of a layer; return their offset."""
        offset = self.weights
        self.offsets.append(offsets.astype(np.int32))
        self.values.append(values.astype(np.float32))
        self.weights += len(values)
        return offset

    def joined(self, kind: str, dtype: Any) -> Any:
        """Return the array of a kind."""
        return np.concatenate([np.zeros(0, dtype), *self.parts[kind]]).astype(dtype)
