"""Functions that tests run as one of several ranks, each in its own process."""

import contextlib
import os
import socket
from pathlib import Path

import torch
from lightning_fabric import Fabric

from probmask.cli import main
from probmask.data import load_data
from probmask.masking.parametrization import masked_parameters
from probmask.methods.probmask.learned import ProbMaskedWeight
from probmask.training.config import TrainConfig
from probmask.training.run import TrainingRun


def free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_world(rank: int, ranks: int, port: int) -> None:
    """Set the variables of an external launcher, so that this process is one of several ranks."""
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


def some_updates(rank: int, ranks: int, port: int, config: TrainConfig, out: Path) -> None:
    """Train; save the noise before and the parameters after every update."""
    join_world(rank, ranks, port)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp")
    fabric.launch()
    data = load_data(config.data)
    run = TrainingRun(config, data)
    run.prepare(fabric, data)
    run.loop.network.train()
    masked = {path: each for path, _, _, each in masked_parameters(run.model)}
    probs = {path: each for path, each in masked.items() if isinstance(each, ProbMaskedWeight)}
    noise, states, images = [], [], []
    for batch in run.loop.batches():
        noise.append([each.noise.clone() for each in probs.values()])
        images.append(batch.inputs)
        run.loop.update(batch)
        tensors = dict(run.model.named_parameters())
        tensors |= {f"{path}.prob": each.prob for path, each in probs.items()}
        states.append({name: tensor.detach().clone() for name, tensor in tensors.items()})
    found = {"noise": noise, "states": states, "images": images}
    torch.save(found, out / f"rank{rank}.pt")
    fabric.barrier()
