"""The constant numbers of a program, each kind in one array."""

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]


class Numbers:
    """What operations read beside their row of the table: weights, windows, divisors, masks."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {k: [] for k in ("longs", "constants", "masks")}
        self.sizes: Counter[str] = Counter()
        self.offsets: list[npt.NDArray[np.int32]] = []
        self.values: list[npt.NDArray[np.float32]] = []
        self.weights = 0

    def add(self, kind: str, numbers: Any) -> int:
        """Append numbers; return their place."""
        place = self.sizes[kind]
        self.parts[kind].append(numbers)
        self.sizes[kind] += len(numbers)
        return place

    def add_weights(self, offsets: Any, values: Any) -> int:
        """Append the non-zero weights of a layer; return their place."""
        place = self.weights
        self.offsets.append(offsets.astype(np.int32))
        self.values.append(values.astype(np.float32))
        self.weights += len(values)
        return place

    def joined(self, kind: str, dtype: Any) -> Any:
        """All numbers of a kind."""
        return np.concatenate([np.zeros(0, dtype), *self.parts[kind]]).astype(dtype)
