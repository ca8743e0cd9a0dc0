"""Memory planning: offsets of a program's tensors in one arena.

Tensors of one layout that are not needed at the same time share a slot.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probmask.runtime.lower.nodes import Concatenate, Convolution, Form, Node, Reshape
from probmask.runtime.plan.tensor_layout import Layout, Layouts

# Floats after the last tensor, which vector loads may read.
_MARGIN = 64


@dataclass
class Slot:
    """A part of the arena for planes of one layout. Its offset is set by `Arena.place_slots`."""

    layout: Layout
    channels: int
    offset: int = -1


@dataclass(frozen=True)
class SlotPart:
    """A position within a slot, or within a part of one."""

    slot: "Slot | SlotPart"
    shift: int

    @property
    def offset(self) -> int:
        """Offset in the arena, valid once the slot has one."""
        return self.slot.offset + self.shift


@dataclass
class PlacedTensor:
    """A tensor in a slot."""

    slot: Slot | SlotPart
    layout: Layout
    channels: int

    def part(self, channel: int, channels: int) -> "PlacedTensor":
        """Return a range of channels."""
        if (channel, channels) == (0, self.channels):
            return self
        shift = channel * self.layout.plane
        return PlacedTensor(SlotPart(self.slot, shift), self.layout, channels)


class Arena:
    """The slots of a program's tensors.

    Tensors are identified by name and number of lanes: 1 for tensors of single images, ``lanes``
    for those of groups. The program's operations have to be added in the order in which they run.
    """

    def __init__(
        self, nodes: Sequence[Node], outputs: Iterable[str], lanes: int, ungrouped: int
    ) -> None:
        self.nodes, self.outputs, self.lanes, self.ungrouped = nodes, outputs, lanes, ungrouped
        self.layouts = {1: Layouts(nodes[:ungrouped], 1), lanes: Layouts(nodes[ungrouped:], lanes)}
        if lanes == 1:
            self.layouts = {1: Layouts(nodes, 1)}
        self.forms = {
            node.name: node.form
            for node in nodes
            if isinstance(node, Concatenate) and node.form is not None
        }
        self.roots = {node.name: node.inputs[0] for node in nodes if isinstance(node, Reshape)}
        self.tensors: dict[tuple[str, int], PlacedTensor] = {}
        self.slots: list[Slot] = []
        self.free: dict[Layout, list[Slot]] = {}
        # Residuals whose slot was taken over by the sum; their last read does not free it.
        self.overwritten: set[tuple[str, int]] = set()
        # Tensors of single images that groups read.
        self.interleaved: list[str] = []
        self.workspace: Slot | None = None
        # For a part of a concatenation: the concatenation that it is written into, and where.
        self.homes = self._find_homes()
        self.reads = self._count_reads()

    def root(self, name: str) -> str:
        """Return the name of the tensor that a reshaped view refers to."""
        while name in self.roots:
            name = self.roots[name]
        return name

    def _find_homes(self) -> dict[str, tuple[str, int]]:
        """Return the tensors that can be computed in the place where a concatenation has them."""
        homes: dict[str, tuple[str, int]] = {}
        for side in (self.nodes[: self.ungrouped], self.nodes[self.ungrouped :]):
            computed = {node.name for node in side} - set(self.roots)
            for node in side:
                if not isinstance(node, Concatenate):
                    continue
                channel = 0
                for name, form in zip(node.inputs, node.input_forms, strict=True):
                    if name in computed and name not in homes and node.inputs.count(name) == 1:
                        homes[name] = (node.name, channel)
                    channel += form.channels
        return homes

    def _count_reads(self) -> Counter[tuple[str, int]]:
        """Count how often each tensor is read; reads of a view count for its root."""
        reads: Counter[tuple[str, int]] = Counter()
        interleaved = set()
        grouped = {node.name for node in self.nodes[self.ungrouped :]} - set(self.roots)
        for i, node in enumerate(self.nodes):
            if isinstance(node, Reshape):
                continue
            lanes = 1 if i < self.ungrouped else self.lanes
            for name in map(self.root, node.inputs):
                reads[name, lanes] += 1
                if i >= self.ungrouped and name not in grouped:
                    interleaved.add(name)
        for name in interleaved:
            reads[name, 1] += 1
        for output in self.outputs:
            name = self.root(output)
            reads[name, self.lanes if name in grouped else 1] += 1
        self.interleaved = sorted(interleaved)
        # A concatenation stays in memory as long as one of the parts that were written into it.
        for (name, lanes), count in list(reads.items()):
            for owner in self._owners(name):
                reads[owner, lanes] += count
        return reads

    def _owners(self, name: str) -> list[str]:
        """Return the concatenations that a tensor is a part of, the innermost first."""
        owners = []
        while name in self.homes:
            name = self.homes[name][0]
            owners.append(name)
        return owners

    def allocate(self, name: str, lanes: int, form: Form) -> PlacedTensor:
        """Allocate the tensor that is computed next."""
        if (name, lanes) in self.tensors:  # a concatenation that has parts already
            return self.tensors[name, lanes]
        layout = self.layouts[lanes].of(form)
        if name in self.homes:
            owner, channel = self.homes[name]
            whole = self.allocate(owner, lanes, self.forms[owner])
            self.tensors[name, lanes] = whole.part(channel, form.channels)
            return self.tensors[name, lanes]
        slot = self._take_slot(layout, form.channels)
        tensor = PlacedTensor(slot, layout, form.channels)
        self.tensors[name, lanes] = tensor
        if not self.reads[name, lanes]:
            self._free_slot(slot)
        return tensor

    def allocate_temporary(self, name: str, lanes: int, form: Form) -> PlacedTensor:
        """Allocate a tensor within a node; `mark_read` frees it."""
        self.reads[name, lanes] = 1
        return self.allocate(name, lanes, form)

    def _take_slot(self, layout: Layout, channels: int) -> Slot:
        """Return the smallest free slot that is large enough, or enlarge the largest.

        Of equal ones, take the one that was freed last: it is most likely still in the cache. The
        fewer bytes all tensors have together, the more of them are.
        """
        free = self.free.setdefault(layout, [])
        if free:
            fitting = [slot for slot in free if slot.channels >= channels]
            sizes = [slot.channels for slot in fitting or free]
            wanted = min(sizes) if fitting else max(sizes)
            index = max(i for i, slot in enumerate(free) if slot.channels == wanted)
            slot = free.pop(index)
            slot.channels = max(slot.channels, channels)
            return slot
        slot = Slot(layout, channels)
        self.slots.append(slot)
        return slot

    def _free_slot(self, slot: Slot) -> None:
        self.free.setdefault(slot.layout, []).append(slot)

    def get(self, name: str, lanes: int) -> PlacedTensor:
        """Return a tensor that was allocated before."""
        return self.tensors[self.root(name), lanes]

    def mark_read(self, names: Sequence[str], lanes: int) -> None:
        """Count one read of each tensor, and free its slot after the last."""
        for name in (tensor for read in names for tensor in self._owned(self.root(read))):
            self.reads[name, lanes] -= 1
            kept = (name, lanes) in self.overwritten or name in self.homes
            if not self.reads[name, lanes] and not kept:
                slot = self.tensors[name, lanes].slot
                assert isinstance(slot, Slot)
                self._free_slot(slot)

    def _owned(self, name: str) -> list[str]:
        """Return a tensor and the concatenations that it is a part of."""
        return [name, *self._owners(name)]

    def allocate_scratch(self, floats: int) -> Slot:
        """Allocate a slot that is not shared."""
        slot = Slot(Layout(1, floats, floats, 0, floats, 1), 1)
        self.slots.append(slot)
        return slot

    def allocate_workspace(self, floats: int) -> Slot:
        """Return the slot of all operations that need memory only while they run."""
        if self.workspace is None:
            self.workspace = self.allocate_scratch(0)
        largest = max(floats, self.workspace.layout.plane)
        self.workspace.layout = Layout(1, largest, largest, 0, largest, 1)
        return self.workspace

    def overwrite_residual(self, node: Convolution, lanes: int) -> PlacedTensor | None:
        """Return the residual's tensor for the result, if nothing else reads the residual.

        Each element of the sum depends on the residual only at its own position.
        """
        if len(node.inputs) < 2 or not self.reads[node.name, lanes]:
            return None
        if node.views and node.views[1].channels != node.views[1].width():
            return None  # the residual is a part of a tensor
        source, residual = map(self.root, node.inputs)
        if self.reads[residual, lanes] != 1 or residual == source:
            return None
        if node.name in self.homes or residual in self.homes:
            return None
        tensor = self.tensors[residual, lanes]
        self.tensors[node.name, lanes] = tensor
        self.overwritten.add((residual, lanes))
        return tensor

    def place_slots(self) -> int:
        """Set the offsets of all slots; return the size of the arena in floats."""
        offset = 0
        for slot in self.slots:
            slot.offset = offset
            size = slot.channels * slot.layout.plane
            offset += -(-size // 16) * 16 + 16
        return offset + _MARGIN
