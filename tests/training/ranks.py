"""Functions that tests run as one of several ranks, each in its own process."""

import contextlib
import ctypes
import os
import socket
import tempfile
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric

from probmask.cli import main
from probmask.data import Batch, load_data
from probmask.masking.parametrization import masked_parameters
from probmask.masking.sparsifier import Sparsifier
from probmask.methods.probmask.learned import ProbMaskedWeight
from probmask.training import run
from probmask.training.checkpoint import write_checkpoint
from probmask.training.config import TrainConfig
from probmask.training.devices import launch_fabric
from probmask.training.loop import Loop
from probmask.training.metrics import MetricsLog
from probmask.training.run import TrainingRun
from probmask.training.run_directory import RunDirectory
from probmask.training.sharded_building import Blueprint, build_seeded
from probmask.training.sharded_state import whole_state
from probmask.training.trainer import train
from reference.memory_limit import limit_data
from training.small import flags, large, small, start, tiny

DIED = 9  # exit code of a rank that died as planned


def start_ranks(function: Any, *arguments: Any, ranks: int = 2) -> list[BaseProcess]:
    port = free_port()
    return [start(function, rank, ranks, port, *arguments) for rank in range(ranks)]


def finish(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0] * len(processes)


def run_until(arguments: list[str], step: int, *, ranks: int, complete: bool = True) -> None:
    """Run `probmask` on some ranks until its checkpoint of this step; then all of them die."""
    first, *others = start_ranks(command_until, arguments, step, complete, ranks=ranks)
    first.join(240)
    for each in others:
        each.kill()
        each.join()
    assert first.exitcode == DIED


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_world(rank: int, ranks: int, port: int) -> None:
    """Set the variables of an external launcher, so that this process is one of several ranks."""
    if ranks == 1:
        return
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "NODE_RANK": "0",
        "LOCAL_RANK": str(rank),
    }


def command(rank: int, ranks: int, port: int, arguments: list[str]) -> None:
    """Run `probmask` as one rank."""
    join_world(rank, ranks, port)
    raise SystemExit(main(arguments))


def command_until(
    rank: int, ranks: int, port: int, arguments: list[str], step: int, complete: bool
) -> None:
    """Run `probmask` as one rank; the first one dies when it has written this checkpoint.

    If it is not to be ``complete``, it dies when the ranks have written their rows.
    """

    def write(path: Path, state: Any) -> None:
        if complete or state["step"] != step:
            write_checkpoint(path, state)
        if state["step"] == step:
            os._exit(DIED)

    run.write_checkpoint = write
    command(rank, ranks, port, arguments)


def command_with_errors_in(
    rank: int, ranks: int, port: int, arguments: list[str], directory: Path
) -> None:
    """Run `probmask` as one rank, with its standard error in a file."""
    with (directory / f"stderr{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
        command(rank, ranks, port, arguments)


def command_in_namespace(
    rank: int, ranks: int, port: int, arguments: list[str], directory: Path, names: list[str]
) -> None:
    """Run `probmask` as one rank, in a network namespace of its own."""
    with Path("/run/netns", names[rank]).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    join_world(rank, ranks, port)
    os.environ |= {"MASTER_ADDR": "10.77.1.1", "GLOO_SOCKET_IFNAME": "veth0"}
    with (directory / f"stderr{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
        raise SystemExit(main(arguments))


def command_that_dies_restoring(
    rank: int, ranks: int, port: int, arguments: list[str], directory: Path
) -> None:
    """Run `probmask` as one rank; the second one dies while the states are loaded."""
    if rank == 1:
        TrainingRun._load = lambda *_: os._exit(DIED)  # type: ignore[assignment, method-assign]
    command_with_errors_in(rank, ranks, port, arguments, directory)


def command_on_node(
    rank: int, ranks: int, port: int, arguments: list[str], directory: Path, restarts: int
) -> None:
    """Run `probmask` as the only rank of a node, as ``torchrun`` would start it."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "RANK": str(rank),
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "GROUP_WORLD_SIZE": str(ranks),
        "GROUP_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }
    with (directory / f"stderr{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
        raise SystemExit(main(arguments))


def restored_state(
    rank: int, ranks: int, port: int, config: TrainConfig, directory: Path, out: Path
) -> None:
    """Restore a checkpoint on some number of ranks, and write it again."""
    join_world(rank, ranks, port)
    torch.set_num_threads(1)
    data = load_data(config.data)
    fabric = launch_fabric(config)
    restored = TrainingRun(config, data, resumed=True)
    restored.prepare(fabric, data)
    restored.restore(RunDirectory(directory))
    log = MetricsLog(out / "log", None) if rank == 0 else None
    state = whole_state(restored._state(log), keep=rank == 0)
    if rank == 0:
        write_checkpoint(out / f"{ranks}.safetensors", state)
    fabric.barrier()


def some_updates(rank: int, ranks: int, port: int, config: TrainConfig, out: Path) -> None:
    """Train; save the noise before and the parameters after every update."""
    join_world(rank, ranks, port)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    data = load_data(config.data)
    training = TrainingRun(config, data)
    training.prepare(fabric, data)
    training.loop.network.train()
    masked = {path: each for path, _, _, each in masked_parameters(training.model)}
    probs = {path: each for path, each in masked.items() if isinstance(each, ProbMaskedWeight)}
    noise, states, images = [], [], []
    for batch in training.loop.batches():
        noise.append([each.noise.clone() for each in probs.values()])
        images.append(batch.inputs)
        training.loop.update(batch)
        tensors = dict(training.model.named_parameters())
        tensors |= {f"{path}.prob": each.prob for path, each in probs.items()}
        states.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
    found = {"noise": noise, "states": states, "images": images}
    torch.save(found, out / f"rank{rank}.pt")
    fabric.barrier()


def built_under_limit(ranks: int) -> None:
    """Build a network of 126 MB in a process that may allocate half of them."""
    large_of_rank = Blueprint.of(large)
    tiny_of_rank = Blueprint.of(tiny)
    assert tiny_of_rank is not None
    tiny_of_rank.build_rows(seed=0, rank=0, ranks=4)  # imports modules of PyTorch
    limit_data(64 << 20)
    if ranks == 1:
        build_seeded(large, 0)
    else:
        assert large_of_rank is not None
        assert large_of_rank.build_rows(seed=0, rank=0, ranks=ranks)[1]


def trained_under_limit(rank: int, ranks: int, port: int, out: Path) -> None:
    """Train a network of 31 million weights as one rank that may allocate few more bytes."""
    given = {
        "model": "training.small:large",
        "epochs": 1,
        "batch_size": 512,
        "devices": ranks,
        "strategy": "fsdp",
        "accelerator": "cpu",
        "checkpoint_seconds": 0,
        "method__sparsity": 0.9,
    }
    with tempfile.TemporaryDirectory() as other:  # compiles the kernels
        train(small(epochs=1, batch_size=512), out=Path(other) / "run")
    limit_data(1000 << 20)
    command(rank, ranks, port, ["train", "--quiet", "--out", str(out), *flags(**given)])


def command_with_a_changed_weight(
    rank: int, ranks: int, port: int, arguments: list[str], directory: Path
) -> None:
    """Run `probmask` as one rank; a weight of the second one changes after 50 updates."""
    update = Loop.update

    def update_and_change(loop: Loop, batch: Batch) -> None:
        update(loop, batch)
        if loop.step == 50 and isinstance(loop.sparsifier, Sparsifier):
            with torch.no_grad():
                loop.sparsifier.sites[1].weight.view(-1)[5] += 1e-6

    if rank == 1:
        Loop.update = update_and_change  # type: ignore[method-assign]
    command_with_errors_in(rank, ranks, port, arguments, directory)
