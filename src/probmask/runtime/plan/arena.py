"""Where tensors live in the arena, and for how long: those that do not live at once share room."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from probmask.runtime.lower.nodes import Convolution, Form, Node, Reshape
from probmask.runtime.plan.tensor_layout import Layout, Layouts

# Readable floats after the last tensor.
_MARGIN = 64


@dataclass
class Slot:
    """Room for planes of one layout; tensors that do not live at once share it."""

    layout: Layout
    channels: int
    place: int = -1


class Shifted(Slot):
    """A place within a slot."""

    def __init__(self, slot: Slot, shift: int) -> None:
        self.slot, self.shift = slot, shift

    @property
    def place(self) -> int:  # type: ignore[override]
        """Known once the slot has its own."""
        return self.slot.place + self.shift


@dataclass
class Tensor:
    """Planes of one layout in a slot."""

    slot: Slot
    layout: Layout
    channels: int


class Tensors:
    """The places of a program's tensors, by name and lanes, as they come and go."""

    def __init__(
        self, nodes: Sequence[Node], outputs: Iterable[str], lanes: int, lone: int
    ) -> None:
        self.nodes, self.outputs, self.lanes, self.lone = nodes, outputs, lanes, lone
        self.layouts = {1: Layouts(nodes[:lone], 1), lanes: Layouts(nodes[lone:], lanes)}
        if lanes == 1:
            self.layouts = {1: Layouts(nodes, 1)}
        self.roots = {node.name: node.inputs[0] for node in nodes if isinstance(node, Reshape)}
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.slots: list[Slot] = []
        self.free: dict[Layout, list[Slot]] = {}
        self.kept: set[tuple[str, int]] = set()  # whose place another tensor has taken over
        self.uses = self._count_uses()

    def root(self, name: str) -> str:
        """The tensor that a name, perhaps of a view, stands for."""
        while name in self.roots:
            name = self.roots[name]
        return name

    def _count_uses(self) -> Counter[tuple[str, int]]:
        """How often each tensor is read, by name and lanes; views count for what they show."""
        uses: Counter[tuple[str, int]] = Counter()
        crossing = set()
        late = {node.name for node in self.nodes[self.lone :]} - set(self.roots)
        for i, node in enumerate(self.nodes):
            if isinstance(node, Reshape):
                continue
            lanes = 1 if i < self.lone else self.lanes
            for name in map(self.root, node.inputs):
                uses[name, lanes] += 1
                if i >= self.lone and name not in late:
                    crossing.add(name)
        for name in crossing:
            uses[name, 1] += 1
        for output in self.outputs:
            name = self.root(output)
            uses[name, self.lanes if name in late else 1] += 1
        self.crossing = sorted(crossing)
        return uses

    def new(self, name: str, lanes: int, form: Form) -> Tensor:
        """Room for a tensor that is computed next."""
        layout = self.layouts[lanes].of(form)
        slot = self._take(layout, form.channels)
        tensor = Tensor(slot, layout, form.channels)
        self.tensors[name, lanes] = tensor
        if not self.uses[name, lanes]:
            self._give_back(slot)
        return tensor

    def _take(self, layout: Layout, channels: int) -> Slot:
        """The room that was given back last: it is most likely still in the cache."""
        free = self.free.setdefault(layout, [])
        if free:
            slot = free.pop()
            slot.channels = max(slot.channels, channels)
            return slot
        slot = Slot(layout, channels)
        self.slots.append(slot)
        return slot

    def _give_back(self, slot: Slot) -> None:
        self.free.setdefault(slot.layout, []).append(slot)

    def read(self, name: str, lanes: int) -> Tensor:
        """A tensor that was computed before."""
        return self.tensors[self.root(name), lanes]

    def used(self, names: Sequence[str], lanes: int) -> None:
        """One reader of each is done; after the last the room is free."""
        for name in map(self.root, names):
            self.uses[name, lanes] -= 1
            if not self.uses[name, lanes] and (name, lanes) not in self.kept:
                self._give_back(self.tensors[name, lanes].slot)

    def place_all(self) -> int:
        """Give all rooms their places; return the size of the arena."""
        place = 0
        for slot in self.slots:
            slot.place = place
            size = slot.channels * slot.layout.plane
            place += -(-size // 16) * 16 + 16
        return place + _MARGIN

    def room(self, floats: int) -> Slot:
        """Room that no tensor shares."""
        slot = Slot(Layout(1, floats, floats, 0, floats, 1), 1)
        self.slots.append(slot)
        return slot

    def in_place_of_residual(self, node: Convolution, lanes: int) -> Tensor | None:
        """The residual's place, if nothing else reads it: each result needs only its own."""
        if len(node.inputs) < 2 or not self.uses[node.name, lanes]:
            return None
        source, other = map(self.root, node.inputs)
        if self.uses[other, lanes] != 1 or other == source:
            return None
        tensor = self.tensors[other, lanes]
        self.tensors[node.name, lanes] = tensor
        self.kept.add((other, lanes))
        return tensor
