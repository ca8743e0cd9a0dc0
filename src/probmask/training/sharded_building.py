"""Build a network of which every rank keeps its rows only, with the same bits as the whole one.

FSDP2 accepts a network without memory (on the "meta" device), but then nothing is initialized: a
network initializes its weights in its constructor. So the network is built twice. The first time,
on the meta device, the operations on every parameter are recorded. The second time they are
computed, and a parameter whose last operation is done is replaced by the rows of this rank. Memory
that is overwritten next is freed too, since many networks initialize their weights twice. A rank
therefore holds its rows and the tensors at work, as a rule one or two, and the random numbers are
those of the whole network.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from probmask.masking.sharding import rows_of
from probmask.messages import one_line

_logger = logging.getLogger("probmask")
# In-place operations whose result does not depend on the earlier content.
_OVERWRITING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_"}
# `nn.Parameter` calls it only for tensors that something else refers to, such as the recorder.
_IGNORED = torch.ops.aten.detach.default


@dataclass(frozen=True)
class _Use:
    """The use of a tensor by an operation: their numbers, and whether it overwrites the memory."""

    operation: int
    place: int
    overwrites: bool


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates all tensors on the meta device.

    ``torch.device("meta")`` would also skip the functions of ``torch.nn.init``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **_with_device(func, kwargs or {}))


def _with_device(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    takes_device = any(each.name == "device" for each in func._schema.arguments)
    return {**kwargs, "device": torch.device("meta")} if takes_device else dict(kwargs)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates all tensors on the meta device, and records which memory each operation uses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Any] = []
        self._uses: dict[int, list[_Use]] = {}
        self._memories: list[Any] = []  # so that no memory gets the address of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **_with_device(func, kwargs or {}))
        if func is _IGNORED:
            return result
        seen = set()
        for place, tensor in enumerate(_tensors(args, kwargs, result)):
            memory = tensor.untyped_storage()
            if memory._cdata in seen:
                continue
            seen.add(memory._cdata)
            whole = tensor.numel() * tensor.itemsize == memory.nbytes()
            overwrites = whole and place == 0 and func.overloadpacket.__name__ in _OVERWRITING
            use = _Use(len(self.operations), place, overwrites)
            self._uses.setdefault(memory._cdata, []).append(use)
            self._memories.append(memory)
        self.operations.append(func)
        return result

    def uses(self, parameter: Tensor) -> Sequence[_Use]:
        """Return the uses of the memory of a parameter."""
        return self._uses.get(parameter.untyped_storage()._cdata, ())


@dataclass(frozen=True)
class Blueprint:
    """How a network is built: the network on the meta device, and the operations."""

    build: Callable[[], nn.Module]
    model: nn.Module
    operations: Sequence[Any]
    uses: Mapping[str, Sequence[_Use]]  # by the name of the parameter

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> Self | None:
        """Return the blueprint, or None, with a line in the log, if there can be none."""
        recorder = _Recorder()
        try:
            with recorder:
                model = build()
        except Exception as error:  # a network may do anything
            log_whole_network(one_line(error))
            return None
        uses = {name: recorder.uses(each) for name, each in model.named_parameters()}
        if len(uses) < sum(1 for _ in model.named_parameters(remove_duplicate=False)):
            log_whole_network("some parameters are shared by several modules")
            return None
        if not all(uses.values()):
            log_whole_network("some parameters were not created by operations of PyTorch")
            return None
        return cls(build, model, recorder.operations, uses)

    def build_rows(
        self, *, seed: int, rank: int, ranks: int
    ) -> tuple[nn.Module, dict[str, Tensor]]:
        """Build the network for a rank.

        Returns:
            The network, with parameters on the meta device, and the rows of each. If that is
            impossible, the whole network and no rows.
        """
        builder = _RowBuilder(self, rank, ranks)
        try:
            with builder:
                model = build_seeded(self.build, seed)
            _check_buffers(model)
        except _UnlikeBlueprintError as error:
            log_whole_network(str(error))
            return build_seeded(self.build, seed), {}
        _move_parameters_to_meta(model)
        return model, builder.rows


def build_seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the whole network from this seed."""
    torch.manual_seed(seed)
    return build()


class _UnlikeBlueprintError(Exception):
    """The network was built in another way than on the meta device."""


class _RowBuilder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the rows of finished parameters, and frees memory that is not needed any more."""

    def __init__(self, blueprint: Blueprint, rank: int, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, Tensor] = {}
        self._operations, self._done = blueprint.operations, 0
        self._parameters = dict(blueprint.model.named_parameters())
        self._rank, self._ranks = rank, ranks
        # By operation: the parameter, its use in this operation, and the next one.
        self._uses: dict[int, list[tuple[str, _Use, _Use | None]]] = {}
        for name, uses in blueprint.uses.items():
            for use, following in zip(uses, [*uses[1:], None], strict=True):
                self._uses.setdefault(use.operation, []).append((name, use, following))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _IGNORED:
            return func(*args, **(kwargs or {}))
        expected = self._operations[self._done : self._done + 1]
        if expected != [func]:
            raise _UnlikeBlueprintError(f"its constructor calls {func} only on a real device")
        uses = self._uses.get(self._done, ())
        self._done += 1
        given = _tensors(args, kwargs, None)
        for name, use, _ in uses:
            if use.overwrites:
                memory = given[use.place].untyped_storage()
                memory.resize_(self._parameters[name].untyped_storage().nbytes())
        result = func(*args, **(kwargs or {}))
        found = _tensors(args, kwargs, result)
        for name, use, following in uses:
            memory = found[use.place].untyped_storage()
            if following is None:
                self.rows[name] = self._rows(memory, self._parameters[name])
            if following is None or following.overwrites:
                memory.resize_(0)
        return result

    def _rows(self, memory: torch.UntypedStorage, parameter: Tensor) -> Tensor:
        layout = parameter.storage_offset(), parameter.shape, parameter.stride()
        whole = torch.empty(0, dtype=parameter.dtype).set_(memory, *layout)
        parts = whole.chunk(self._ranks)  # as FSDP2 does
        return parts[self._rank].clone() if self._rank < len(parts) else whole[:0].clone()


def fill_rows(model: nn.Module, rows: Mapping[str, Tensor], device: torch.device) -> None:
    """Move a network that FSDP2 shards from the meta device, and set its rows."""
    model._apply(  # type: ignore[no-untyped-call]
        lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows_of(parameter).copy_(rows[name])


def log_whole_network(reason: str) -> None:
    """Log that every rank builds the whole network."""
    _logger.info("every rank builds the whole network before it is sharded: %s", reason)


def _tensors(args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    return [each for each in tree_leaves((args, kwargs or {}, result)) if isinstance(each, Tensor)]


def _check_buffers(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.untyped_storage().nbytes():
            raise _UnlikeBlueprintError(f"buffer {name} shares the memory of a parameter")


def _move_parameters_to_meta(model: nn.Module) -> None:
    """Replace the parameters, whose memory is freed."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty_like(parameter, device="meta")
                module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
