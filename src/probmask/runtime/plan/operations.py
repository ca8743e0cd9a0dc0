"""The operations of a program while it is planned: rows of the table, and what they refer to."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from probmask.runtime.kernels.operation_table import COLUMNS, Field
from probmask.runtime.lower.nodes import INFINITY, Node
from probmask.runtime.plan.arena import Arena, PlacedTensor, Slot, SlotPart
from probmask.runtime.plan.partition import Step
from probmask.runtime.plan.program_data import Data
from probmask.runtime.plan.tensor_layout import Layout, Longs


@dataclass
class Operation:
    """A row of the table. Arena offsets are given by slots, which are placed last."""

    fields: dict[Field, Any]
    limits: tuple[float, float]
    owner: str


class Operations:
    """The operations of a step, in the order in which they run.

    Attributes:
        step: The step.
        arena: The tensors of the program.
        data: The arrays that operations refer to by offset.
        threads: Number of threads, each with scratch memory of its own.
        lanes: Number of images in a group.
        reordered: Whether the rows of a layer are computed in the order that is fastest.
    """

    def __init__(
        self, step: Step, threads: int, lanes: int, ungrouped: int, *, reordered: bool
    ) -> None:
        self.step, self.reordered = step, reordered
        self.threads, self.lanes = threads, lanes
        names = [output.name for output in step.outputs]
        self.arena = Arena(step.nodes, names, lanes, ungrouped)
        self.rows: list[Operation] = []
        self.data = Data()
        self._bits: dict[Layout, int] = {}

    def table(self) -> Longs:
        """Return the table; the slots have to be placed."""
        table = np.zeros((len(self.rows), COLUMNS), np.int64)
        for i, operation in enumerate(self.rows):
            for key, value in operation.fields.items():
                table[i, key] = value.offset if isinstance(value, Slot | SlotPart) else value
        return table

    def emit(
        self,
        owner: str,
        fields: dict[Field, Any],
        limits: tuple[float, float] = (-INFINITY, INFINITY),
    ) -> None:
        """Append a row that belongs to the node ``owner``."""
        fields = {Field.OTHER: -1, Field.VALUES: -1, Field.MASK: -1, **fields}
        self.rows.append(Operation(fields, limits, owner))

    def input(self, node: Node, index: int, lanes: int) -> PlacedTensor:
        """Return an input of a node, or the channels of it that the node reads."""
        tensor = self.arena.get(node.inputs[index], lanes)
        if index >= len(node.views):
            return tensor
        view = node.views[index]
        return tensor.part(view.channel, view.width())

    def from_to(self, source: PlacedTensor, target: PlacedTensor) -> dict[Field, Any]:
        """Return the fields that say where two tensors are."""
        return {
            Field.SOURCE: source.slot,
            Field.SOURCE_PLANE: source.layout.plane,
            Field.SOURCE_LEAD: source.layout.lead,
            Field.SOURCE_STRIDE: source.layout.stride,
            Field.TARGET: target.slot,
            Field.TARGET_PLANE: target.layout.plane,
            Field.TARGET_LEAD: target.layout.lead,
            Field.TARGET_STRIDE: target.layout.stride,
            Field.ROWS: target.channels,
            Field.HEIGHT: target.layout.height,
            Field.WIDTH: target.layout.width,
            Field.LANES: target.layout.lanes,
        }

    def bits_of(self, layout: Layout) -> int:
        """Return where the bits of a layout's positions are."""
        if layout not in self._bits:
            offset = self.data.add("position_bits", layout.position_bits())
            self._bits[layout] = offset
        return self._bits[layout]
