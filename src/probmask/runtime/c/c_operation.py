"""A row of a program's table, and where its C source goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from probmask.runtime.c.c_tables import Tables
from probmask.runtime.kernels.operation_table import Field, Kind
from probmask.runtime.plan.program import Program

# Position bytes are padded to this many: the widest vector that the C kernels use.
WIDEST = 16


@dataclass(frozen=True)
class Operation:
    """A row of the program's table, and where its C source goes."""

    program: Program
    index: int
    tables: Tables
    # Name of the arena, and a suffix for all names of this operation.
    arena: str
    suffix: str
    # Pointers to the external tensors, and floats per image of each.
    externals: tuple[str, ...]

    def __getitem__(self, field: Field) -> int:
        return int(self.program.table[self.index, field])

    @property
    def limits(self) -> tuple[float, float]:
        """Lower and upper clamp."""
        low, high = self.program.limits[self.index]
        return float(low), float(high)

    @property
    def kind(self) -> Kind:
        """Kind of the operation."""
        return Kind(self[Field.KIND])

    def at(self, field: Field, lead: Field | None = None) -> str:
        """Return a pointer into the arena."""
        return f"{self.arena} + {self[field] + (self[lead] if lead is not None else 0)}"

    def after(self, field: Field, lead: Field, count: int = 0, plane: Field | None = None) -> str:
        """Return a pointer to an element ``count`` planes after a lead; 0 without the tensor."""
        if self[field] < 0:
            return "0"
        step = 1 if plane is None else self[plane]
        return f"{self.arena} + {self[field] + self[lead] + count * step}"

    def final(self, start: int, field: Field) -> str:
        """Return a pointer to a final state of a recurrent layer; 0 if it is not needed."""
        return "0" if self[field] < 0 else f"{self.arena} + {start + self[field]}"

    def external(self, size: int) -> str:
        """Return a pointer to the current image of an external tensor."""
        return f"{self.externals[self[Field.EXTERNAL]]} + {size} * image"

    def define(self, kind: str, members: Mapping[str, Any]) -> str:
        """Define the structure of this operation; return a pointer to it."""
        return "&" + self.tables.structure(kind, f"op{self.suffix}", members)

    def floats(self, name: str, first: int, count: int) -> str:
        """Define an array of constants; return its name."""
        numbers = self.program.constants[first : first + count]
        return self.tables.array("float", f"{name}{self.suffix}", numbers)

    def integers(self, name: str, first: int, count: int) -> str:
        """Define an array of integers; return its name."""
        numbers = self.program.longs[first : first + count].astype(np.int32)
        return self.tables.array("int32_t", f"{name}{self.suffix}", numbers)

    @property
    def run(self) -> int:
        """Number of floats from the first position of the target to the last."""
        rows = (self[Field.HEIGHT] - 1) * self[Field.TARGET_STRIDE]
        return (rows + self[Field.WIDTH]) * self[Field.LANES]

    def positions(self) -> str:
        """Define the bytes of positions and padding; return their name, or 0 without padding."""
        kept = np.zeros(-(-self.run // WIDEST) * WIDEST, np.int8)
        rows, columns = np.arange(self[Field.HEIGHT])[:, None], np.arange(self[Field.WIDTH])
        places = (rows * self[Field.TARGET_STRIDE] + columns).reshape(-1, 1) * self[Field.LANES]
        kept[(places + np.arange(self[Field.LANES])).ravel()] = -1
        if kept.all():
            return "0"
        return self.tables.array("signed char", f"positions{self.suffix}", kept)


def planes_of(op: Operation) -> dict[str, Any]:
    """Return the members that all operations from planes to planes have."""
    return {
        "source": op.at(Field.SOURCE, Field.SOURCE_LEAD),
        "target": op.at(Field.TARGET, Field.TARGET_LEAD),
        "channels": op[Field.ROWS],
        "source_plane": op[Field.SOURCE_PLANE],
        "target_plane": op[Field.TARGET_PLANE],
        "source_stride": op[Field.SOURCE_STRIDE],
        "target_stride": op[Field.TARGET_STRIDE],
        "height": op[Field.HEIGHT],
        "width": op[Field.WIDTH],
    }
