"""Weights that FSDP2 (``torch.distributed.fsdp.fully_shard``) divides among ranks.

Every rank holds some rows of each weight, and computes with the whole weight only while its layer
runs: FSDP2 gathers the rows of all ranks before, and sums the gradients into the rows afterwards.
The masks, the probabilities and the rest of a method's state are rows too. Each rank masks its own
rows just before FSDP2 gathers them (`MaskedRows`), so that the layer computes with the whole masked
weight. The gradient that FSDP2 returns is therefore that of the masked weight. `ShardedWeights`
turns it into the gradients of the weight and of the method's own parameters, once per backward
pass, when all gradients have arrived.

FSDP2 has an interface for tensors that are changed before they are gathered: two functions that it
looks up by name on the tensor of the rows. It allows them to be set later than `fully_shard`.

A masker sees rows only: `rows_of` a weight, and sums over all rows through its ``shards``.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from probmask.core.shards import WHOLE, Shards
from probmask.errors import InputError
from probmask.masking.distributed import RankShards, summed

_PRE, _POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"  # names that FSDP2 looks up


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor. Its module is not imported: that takes a second."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def rows_of(tensor: Any) -> Any:
    """Return the rows of a sharded tensor on this rank, sharing memory; other tensors unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def whole_like(rows: Tensor, weight: Any) -> Tensor:
    """Return the sharded tensor with these rows and the shape of ``weight``; rows if it is plain.

    ``full_tensor()`` of the result gathers it.
    """
    if not is_dtensor(weight) or rows.shape != weight._local_tensor.shape:
        return rows
    made: Tensor = type(weight).from_local(
        rows,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return made


def shards_of(weights: Sequence[Any]) -> Shards:
    """Return the division of these weights, which `check_shards` has accepted."""
    if not weights or not is_dtensor(weights[0]):
        return WHOLE
    mesh = weights[0].device_mesh
    return RankShards(mesh.get_group(mesh.ndim - 1))  # the first dimension of HSDP replicates


def replicas_of(weight: Any) -> Any:
    """Return the process group of the ranks that have the same rows in HSDP, else None."""
    return weight.device_mesh.get_group(0) if weight.device_mesh.ndim > 1 else None


def check_shards(caller: str, model: nn.Module, named: Sequence[tuple[str, Any]]) -> None:
    """Raise unless no weight is sharded, or FSDP2 shards all of them by rows over the same ranks.

    Raises:
        InputError: With the name of the first weight that is divided in another way.
    """
    if not any(is_dtensor(weight) for _, weight in named):
        return
    managed = _fsdp_params(model)
    mesh = next(weight.device_mesh for _, weight in named if is_dtensor(weight))
    for name, weight in named:
        if not is_dtensor(weight):
            raise InputError(
                f"{caller}(model): {name} is not sharded, but other weights are; apply fully_shard "
                "to the whole model, or exclude this weight."
            )
        if id(weight) not in managed or managed[id(weight)][1].is_dtensor:
            raise InputError(
                f"{caller}(model): {name} is a DTensor of tensor parallelism, divided by "
                f"{weight.placements}; only weights that fully_shard has divided can be masked. "
                "Exclude it."
            )
        _check_division(caller, name, weight, *managed[id(weight)])
        if weight.device_mesh != mesh:
            raise InputError(
                f"{caller}(model): {name} is sharded over other ranks than the first weight; pass "
                "the same mesh to every call of fully_shard, or exclude this weight."
            )


def _check_division(caller: str, name: str, weight: Any, group: Any, param: Any) -> None:
    *others, last = weight.placements
    if not last.is_shard(0) or not all(each.is_replicate() for each in others):
        raise InputError(
            f"{caller}(model): {name} is divided by {weight.placements}, not by rows; call "
            "fully_shard without shard_placement_fn, or exclude this weight."
        )
    if param.offload_to_cpu:
        raise InputError(
            f"{caller}(model): {name} is offloaded to the CPU, where FSDP2 cannot mask its rows; "
            "call fully_shard without CPUOffloadPolicy."
        )
    if group._use_post_forward_mesh:
        raise InputError(
            f"{caller}(model): {name} is resharded to fewer ranks after the forward pass, where "
            "FSDP2 cannot mask its rows; pass reshard_after_forward=True or False to fully_shard."
        )


def check_not_fsdp1(caller: str, model: nn.Module) -> None:
    """Raise if the older FSDP has joined the weights: no layer would then have a weight to mask.

    Raises:
        InputError: With the function to use instead.
    """
    library = sys.modules.get("torch.distributed.fsdp")
    if library is not None and any(
        isinstance(module, library.FullyShardedDataParallel) for module in model.modules()
    ):
        raise InputError(
            f"{caller}(model): FullyShardedDataParallel joins weights into flat tensors, which "
            "cannot be masked; use torch.distributed.fsdp.fully_shard."
        )


def _fsdp_modules(model: nn.Module) -> list[Any]:
    library = sys.modules.get("torch.distributed.fsdp")
    if library is None:
        return []
    return [module for module in model.modules() if isinstance(module, library.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Make every module hold its sharded parameters: FSDP2 may have left some gathered."""
    for module in _fsdp_modules(model):
        module.reshard()


def _fsdp_params(model: nn.Module) -> dict[int, tuple[Any, Any]]:
    """Return the group and the parameter of FSDP2 that manage each sharded parameter, by its id."""
    return {
        id(param.sharded_param): (group, param)
        for module in _fsdp_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for param in group.fsdp_params
    }


class MaskedRows:
    """One sharded weight whose rows are masked before FSDP2 gathers them.

    Args:
        weight: The sharded parameter.
        effective: The masked weight as a function of the rows and of the training mode.
        param: What FSDP2 knows about the parameter.
        owner: The weights of the same sparsifier, whose gradients are converted together.
    """

    def __init__(self, weight: Any, effective: Any, param: Any, owner: "ShardedWeights") -> None:
        self.weight, self.effective, self._param, self._owner = weight, effective, param, owner
        self.training = True
        self._earlier: Tensor | None = None  # gradient of earlier backward passes of this update
        self._hook = weight.register_post_accumulate_grad_hook(lambda _: owner.expect(self))
        # Compiled code cannot follow the exchange with FSDP2. Not a decorator: this imports much.
        self.read: Callable[[Any], Any] = torch.compiler.disable(self._read)  # type: ignore[no-untyped-call]

    def install(self) -> None:
        """Make FSDP2 gather the masked rows. It may have replaced the tensor of the rows."""
        rows = rows_of(self.weight)
        if _PRE not in vars(rows):
            setattr(rows, _PRE, self._pre_all_gather)
            setattr(rows, _POST, _post_all_gather)
            self._param._init_extensions()

    def refresh(self) -> None:
        """Have all weights gathered again at their next use."""
        self._owner.refresh()

    def remove(self) -> None:
        """Make FSDP2 gather the plain rows again."""
        rows = rows_of(self.weight)
        vars(rows).pop(_PRE, None)
        vars(rows).pop(_POST, None)
        self._hook.remove()

    def _read(self, weight: Any) -> Any:
        """Return what a module computes with: the gathered weight, which is masked already.

        Outside of a forward pass it is the sharded parameter, which is not masked.
        """
        if is_dtensor(weight):
            return weight
        if _PRE not in vars(rows_of(self.weight)):
            raise RuntimeError(
                "FSDP2 has gathered a weight without its mask, because its rows were replaced; "
                "call sparsifier.load_state_dict(), or attach after the weights are loaded."
            )
        return _Gathered.apply(weight, self)  # type: ignore[no-untyped-call]

    def set_earlier_aside(self) -> None:
        """Keep the gradient of earlier backward passes apart: it is of the weight already."""
        gradient = self.weight.grad
        if gradient is not None:
            rows = rows_of(gradient)
            self._earlier = rows if self._earlier is None else self._earlier + rows
            self.weight.grad = None

    def discard_earlier(self) -> None:
        """Forget the gradient of earlier backward passes."""
        self._earlier = None

    @torch.no_grad()
    def convert_gradient_(self) -> None:
        """Replace the gradient of the masked weight by that of the weight, in place.

        The method's own parameters get theirs too.
        """
        gradient = rows_of(self.weight.grad)
        with torch.enable_grad():
            rows = rows_of(self.weight).detach().requires_grad_()
            torch.autograd.backward(self.effective(rows, self.training), gradient.clone())
        found = rows.grad
        gradient.zero_() if found is None else gradient.copy_(found)
        if self._earlier is not None:
            gradient.add_(self._earlier)
            self._earlier = None

    def _pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        self.training = module.training
        rows = rows_of(self.weight)
        masked = self.effective(rows, module.training)
        masked = masked.to(mp_policy.param_dtype or masked.dtype)
        longest = -(-outer_size[0] // mesh.size())
        if len(masked) < longest:  # FSDP2 gathers the same number of rows from every rank
            padded = masked.new_zeros((longest, *outer_size[1:]))
            padded[: len(masked)] = masked
            masked = padded
        return (masked.contiguous(),), None


def _post_all_gather(
    outputs: tuple[Tensor, ...],
    metadata: Any,  # noqa: ARG001 - FSDP2 passes it
    dtype: torch.dtype,  # noqa: ARG001
    *,
    out: Tensor | None = None,
) -> Any:
    """Use the memory that FSDP2 gathers into as the weight."""
    return None if out is not None else (outputs[0], ())


class _Gathered(torch.autograd.Function):
    """The gathered weight. Its backward pass announces a new gradient of the masked weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: MaskedRows) -> Tensor:
        ctx.rows = rows
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.rows.set_earlier_aside()
        return gradient, None


class ShardedWeights:
    """All sharded weights of one sparsifier, and the conversion of their gradients."""

    def __init__(self, model: nn.Module, weights: Sequence[Any], masker: Any) -> None:
        params = _fsdp_params(model)
        self._modules = _fsdp_modules(model)
        self._masker = masker
        self.rows = [
            MaskedRows(weight, each, params[id(weight)][1], self)
            for weight, each in zip(weights, masker.masked, strict=True)
        ]
        self._expected: list[MaskedRows] = []
        self._loads = [
            module.register_load_state_dict_post_hook(self._loaded) for module in self._modules
        ]
        for each, rows in zip(masker.masked, self.rows, strict=True):
            each.rows = rows
        self.refresh()

    @classmethod
    def of(cls, model: nn.Module, weights: Sequence[Any], masker: Any) -> Self | None:
        """Mask the rows of these weights, or return None if they are not sharded."""
        return cls(model, weights, masker) if is_dtensor(weights[0]) else None

    def refresh(self) -> None:
        """Have the weights gathered again at their next use: masks, modes or weights changed."""
        for module in self._modules:
            module.reshard()
        for rows in self.rows:
            rows.install()

    def weights_changed(self) -> None:
        """Have the masks recomputed: a change of a DTensor is not counted on its rows."""
        for masked in self._masker.masked:
            masked.invalidate()

    def _loaded(self, *_: Any) -> None:
        self.weights_changed()
        self.refresh()

    def expect(self, rows: MaskedRows) -> None:
        """Convert the gradients at the end of the backward pass, when all have arrived."""
        if not self._expected:
            torch.autograd.Variable._execution_engine.queue_callback(self._convert)
        if rows not in self._expected:
            self._expected.append(rows)

    def _convert(self) -> None:
        expected, self._expected = self._expected, []
        order = {index: rows for index, rows in enumerate(self.rows) if rows in expected}
        gradients = {index: rows_of(rows.weight.grad) for index, rows in order.items()}
        with torch.no_grad():
            self._masker.gradients_arrived(gradients)
            for rows in order.values():
                rows.convert_gradient_()

    def share_gradients(self) -> None:
        """Give the masker the rows of the gradients, as ``grad`` of the rows of its weights."""
        for rows in self.rows:
            rows_of(rows.weight).grad = rows_of(rows.weight.grad)

    def discard_gradients(self) -> None:
        """Forget the gradients of all backward passes so far."""
        for rows in self.rows:
            rows.discard_earlier()
            rows_of(rows.weight).grad = None

    def sum_gradients_(self) -> None:
        """Sum the gradients of parameters that all ranks have, such as one threshold per layer.

        FSDP2 has averaged the gradients of the weights; every rank has added those of its rows.
        """
        common = [
            parameter
            for rows, masked in zip(self.rows, self._masker.masked, strict=True)
            for parameter in masked.parameters()
            if parameter.shape != rows_of(rows.weight).shape
        ]
        if not common:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in common]
        flat = torch.cat([gradient.double().reshape(-1) for gradient in gradients])
        parts = self._masker.shards.total(flat).split([p.numel() for p in common])
        for parameter, part in zip(common, parts, strict=True):
            parameter.grad = part.view(parameter.shape).to(parameter.dtype)

    def remove(self) -> None:
        """Leave a model that FSDP2 shards as before."""
        for module in self._modules:
            module.reshard()
        for rows in self.rows:
            rows.remove()
        for hook in self._loads:
            hook.remove()


def counts_nonzero(tensors: Sequence[Any]) -> list[int]:
    """Return the number of nonzero entries of tensors that may be sharded, over all ranks."""
    counts = []
    for tensor in tensors:
        found = torch.count_nonzero(rows_of(tensor.detach()))
        if is_dtensor(tensor):
            for dimension, placement in enumerate(tensor.placements):
                if not placement.is_replicate():
                    found = summed(found, tensor.device_mesh.get_group(dimension))
        counts.append(int(found))
    return counts
