"""The ranks of a run: how they are launched, and how they divide or copy the network."""

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from lightning_fabric import Fabric
from lightning_fabric.accelerators import ACCELERATOR_REGISTRY
from lightning_fabric.accelerators.cpu import CPUAccelerator
from lightning_fabric.accelerators.cuda import CUDAAccelerator
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn

from probmask.errors import InputError
from probmask.launch import available_cores, ranks_of_torchrun
from probmask.messages import one_line, suggestion
from probmask.training.config import TrainConfig
from probmask.training.rank_meeting import Meeting

# The watch (`probmask.masking.rank_watch`) names a rank that does not respond. Messages may take
# longer than it waits, so that it is the first to report. They take long while the first rank
# writes a checkpoint or checks the data.
_PATIENCE = 2
_LEAST_SECONDS = 300.0
_STRATEGIES = ("fsdp", "ddp", "ddp_find_unused_parameters_true")
_RANKS_PER_CORE = 16


class ShardedStrategy(DDPStrategy):
    """Launch ranks as DDP does, and let FSDP2 divide the weights among them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._backward_sync_control = None

    def module_to_device(self, module: nn.Module) -> None:
        """Leave it to `setup_module`: FSDP2 moves only the rows of this rank."""

    def setup_module(self, module: nn.Module) -> Any:
        """Divide the weights of the module, in place."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for block in blocks_of(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return module


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that FSDP2 gathers one at a time: the layers of sequences and lists."""
    for child in model.children():
        repeated = isinstance(model, nn.Sequential | nn.ModuleList)
        if isinstance(child, nn.Sequential | nn.ModuleList) or not repeated:
            yield from blocks_of(child)
        elif any(True for _ in child.parameters()):
            yield child


def launch_fabric(config: TrainConfig, meeting: Meeting | None = None) -> Fabric:
    """Start the ranks, or join those that ``torchrun`` has started and that have met.

    Raises:
        InputError: If the strategy or the accelerator is unknown or cannot be started here.
    """
    _check_known("strategy", config.strategy, _STRATEGIES)
    _check_known(
        "accelerator", config.accelerator, ["gpu", *ACCELERATOR_REGISTRY.available_accelerators()]
    )
    of_torchrun = ranks_of_torchrun()
    nodes, devices = of_torchrun or (1, config.devices)
    if of_torchrun is not None and config.devices not in (1, devices):
        warnings.warn(
            f"torchrun has started {devices} ranks on this machine; devices = {config.devices} is "
            "ignored.",
            stacklevel=2,
        )
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy=_strategy(config, ranks=nodes * devices),
            precision=config.precision,
        )
        if meeting is not None:  # Fabric uses a group that exists
            gpu = isinstance(fabric.accelerator, CUDAAccelerator)
            meeting.create_group("nccl" if gpu else "gloo", _timeout(config))
        _check_cores(fabric, of_torchrun, devices)
        with _without_banner():
            fabric.launch()
    except InputError:
        raise
    except Exception as error:  # Lightning raises errors of many types here
        raise InputError(
            f"train(accelerator={config.accelerator!r}, devices={devices}, strategy="
            f"{config.strategy!r}): Lightning Fabric cannot start: {one_line(error)}"
        ) from error
    return fabric


def _check_cores(fabric: Fabric, of_torchrun: tuple[int, int] | None, devices: int) -> None:
    """Raise if the number of ranks per core exceeds the limit, which keeps the machine usable."""
    cores = available_cores()
    limit = _RANKS_PER_CORE * cores
    if of_torchrun is None and isinstance(fabric.accelerator, CPUAccelerator) and devices > limit:
        raise InputError(
            f"train(devices={devices}): every device on a CPU is a process, and this one may use "
            f"{cores} cores; pass at most {limit}."
        )


@contextmanager
def _without_banner() -> Iterator[None]:
    """Keep Lightning from printing which ranks have joined; its warnings stay."""
    logger = logging.getLogger("lightning_fabric")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _strategy(config: TrainConfig, *, ranks: int) -> Any:
    timeout = _timeout(config)
    if config.strategy == "fsdp":
        return ShardedStrategy(timeout=timeout)
    if config.strategy == "ddp" or (config.strategy == "auto" and ranks > 1):
        return DDPStrategy(timeout=timeout)
    return config.strategy


def _timeout(config: TrainConfig) -> timedelta:
    return timedelta(seconds=max(_LEAST_SECONDS, _PATIENCE * config.timeout_seconds))


def is_sharded(fabric: Fabric) -> bool:
    """Return whether FSDP2 divides the weights among the ranks."""
    return isinstance(fabric.strategy, ShardedStrategy)


def _check_known(name: str, value: str, known: Iterable[str]) -> None:
    known = ["auto", *known]
    if value not in known:
        raise InputError(
            f"train({name}={value!r}): not a supported {name}; {suggestion(value, known)}"
        )
