"""Claim: 10,000 damaged and forged checkpoints cause no traceback and no hang.

The mutants are checkpoints of unfinished runs of several methods. Damage (flipped bits, cuts,
splices) must be refused. Forgeries have a right digest; they must be refused, or the run must
finish or report that it diverged. Each run is resumed and finished in this process, with limits on
time and memory.

    python benchmarks/fuzz_checkpoint.py
"""

import copy
import gc
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from safetensors import safe_open
from safetensors.torch import save

from fuzzing import DAMAGE, Mutation, anything, edit_json_text, edited, fuzz, near, parse_options
from probmask.data import DataSource
from probmask.errors import NonFiniteError
from probmask.training.checkpoint import _digest, read_checkpoint, write_checkpoint
from probmask.training.config import TrainConfig, load_config
from probmask.training.progress import Quiet, Status
from probmask.training.run import TrainingRun, load_run_data
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train

# They save numbers, masks, scores, optimizers of their own, lists and copies of the network.
_METHODS = ("probmask-tied", "probmask", "lottery", "dns", "snfs", "deepr", "str", "dense")
_SETTINGS = {
    "model_args.width": 4,
    "data_args.train_images": 96,
    "data_args.test_images": 32,
    "select_on": "none",
    "batch_size": 32,
    "epochs": 4,
    "dense_twin": False,
    "tensorboard": False,
    "checkpoint_seconds": 0.0,
}


@dataclass(frozen=True)
class Base:
    """An unfinished run: its configuration, its data, and its checkpoint."""

    config: TrainConfig
    data: DataSource
    checkpoint: bytes


class StopInThirdEpoch(Quiet):
    """Interrupts the training in its third epoch, after a checkpoint."""

    def show(self, status: Status) -> None:
        """Raise at the end of the third epoch."""
        if status.epoch == 3:
            raise KeyboardInterrupt


def make_base(method: str, directory: Path) -> Base:
    """Train a run of the method and stop it."""
    settings = {**_SETTINGS, "method.name": method}
    if method != "dense":
        settings["method.sparsity"] = 0.5
    config = load_config(None, list(settings.items()))
    with suppress(KeyboardInterrupt):
        train(config, out=directory, make_reporter=StopInThirdEpoch)
    return Base(config, load_run_data(config), RunDirectory(directory).checkpoint.read_bytes())


def resume(base: Base, path: Path, before: object = None) -> str:
    """Resume and finish the run with the checkpoint at ``path``; return the outcome."""
    if before is not None:
        assert str(read_checkpoint(path)) == before, "damage not detected"
        return "the same"
    run = TrainingRun(base.config, base.data)
    run.prepare(Fabric(accelerator="cpu", devices=1), base.data)
    try:
        run.complete(RunDirectory(path.parent), Quiet)
    except NonFiniteError:
        return "diverged"
    return "finished"


def attempt(
    forge: Callable[[Path, random.Random], object], bases: Sequence[Base], rng: random.Random
) -> str:
    """Change the checkpoint of one of the runs by ``forge``, and resume the run with it."""
    base = rng.choice(bases)
    directory = RunDirectory(Path(tempfile.mkdtemp()))
    try:
        directory.checkpoint.write_bytes(base.checkpoint)
        return resume(base, directory.checkpoint, forge(directory.checkpoint, rng))
    finally:
        shutil.rmtree(directory.path)
        gc.collect()  # networks with masks are reference cycles


def damage(mutation: Mutation, path: Path, rng: random.Random) -> str:
    """Mutate the bytes of the file; return its content before."""
    before = str(read_checkpoint(path))
    path.write_bytes(mutation(path.read_bytes(), rng))
    return before


def forge_tree(path: Path, rng: random.Random) -> None:
    """Change nodes of the JSON in the header, under a right digest."""

    def change(text: str) -> str:
        tree = json.loads(text)
        for _ in range(rng.randint(1, 3)):
            tree = edited(tree, rng, ("tensor", "text", "list", "tuple", "dict", "0", "1"))
        return json.dumps(tree)

    _forge_header(path, change)


def forge_text(path: Path, rng: random.Random) -> None:
    """Write numbers of any size, NaN or deep nesting into the JSON, under a right digest."""

    def change(text: str) -> str:
        spaced = text.replace(",", ", ").replace("[", "[\n: ") if rng.random() < 0.2 else text
        return edit_json_text(spaced.replace('"tensor":', '"tensor": ').encode(), rng).decode()

    _forge_header(path, change)


def _forge_header(path: Path, change: Callable[[str], str]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    text = change(metadata["state"])
    metadata |= {"state": text, "digest": _digest(text, tensors)}
    path.write_bytes(save(tensors, metadata=metadata))


def forge_state(path: Path, rng: random.Random) -> None:
    """Replace, remove, add or swap one to three fields of the state."""
    state = read_checkpoint(path)
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(_places(state)))
        action = rng.randrange(6)
        if action == 0 and isinstance(holder, dict):
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[rng.choice(["extra", 0, -1, None, True, 2**70, "\x1b[2J"])] = holder[key]
        elif action == 2:
            other, place = rng.choice(list(_places(state)))
            holder[key] = copy.deepcopy(other[place])
        elif action == 3:
            holder[key] = _odd_tensor(holder[key], rng)
        elif action == 4:
            holder[key] = near(holder[key], rng)
        else:
            holder[key] = anything(rng)
    write_checkpoint(path, state)


def forge_tensor(path: Path, rng: random.Random) -> None:
    """Replace a tensor by one of another shape, type or content."""
    state = read_checkpoint(path)
    places = [(h, k) for h, k in _places(state) if isinstance(h[k], torch.Tensor)]
    holder, key = rng.choice(places)
    holder[key] = _odd_tensor(holder[key], rng)
    write_checkpoint(path, state)


def forge_size(path: Path, rng: random.Random) -> None:
    """Make a field very large: a text, a list, a table, deep nesting or a tensor."""
    state = read_checkpoint(path)
    holder, key = rng.choice(list(_places(state)))
    many = rng.choice([10**4, 10**5])
    deep: Any = 0
    for _ in range(rng.choice([40, 60, 200])):
        deep = [deep]
    choices: list[Callable[[], Any]] = [
        lambda: "x" * (100 * many),
        lambda: "é\n" * many,
        lambda: [0] * many,
        lambda: dict.fromkeys(range(many)),
        lambda: deep,
        lambda: torch.zeros(many, 10),
        lambda: torch.empty(2**40, 0),
    ]
    holder[key] = rng.choice(choices)()
    write_checkpoint(path, state)


def forge_numbers(path: Path, rng: random.Random) -> None:
    """Change a number or a truth value that the schema may accept."""
    state = read_checkpoint(path)
    places = [(h, k) for h, k in _places(state) if isinstance(h[k], int | float)]
    holder, key = rng.choice(places)
    values = [0, 1, -1, 0.5, 1e-30, 1e30, float("inf"), float("nan"), True, None, 10**30]
    holder[key] = rng.choice(values)
    write_checkpoint(path, state)


def _places(node: Any) -> Any:
    """Yield the container and the key of every field."""
    keys = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        if not isinstance(node, tuple):
            yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _odd_tensor(value: Any, rng: random.Random) -> torch.Tensor:
    """Return a tensor that differs from the value in shape, type or content."""
    tensor = value if isinstance(value, torch.Tensor) else torch.zeros(3)
    flat = tensor.reshape(-1)
    choices: list[Callable[[], torch.Tensor]] = [
        lambda: torch.zeros(()),
        lambda: torch.zeros(0),
        lambda: flat[:-1],
        lambda: tensor[None],
        lambda: flat,
        lambda: torch.cat([flat, flat]),
        lambda: tensor.to(torch.float64),
        lambda: tensor.to(torch.int8),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.to(torch.float8_e4m3fn),
        lambda: tensor.to(torch.bool),
        lambda: ~tensor if tensor.dtype == torch.bool else -tensor,
        lambda: torch.zeros_like(tensor),
        lambda: torch.full_like(tensor, 1),
        lambda: torch.full_like(tensor, float("nan") if tensor.is_floating_point() else 1),
        lambda: torch.full_like(tensor, float("inf") if tensor.is_floating_point() else 0),
        lambda: torch.full_like(tensor, 1e30 if tensor.is_floating_point() else 1),
    ]
    return rng.choice(choices)()


FORGERIES = (forge_tree, forge_text, forge_state, forge_tensor, forge_size, forge_numbers)


def main() -> int:
    """Print the number of results for each kind of mutation. Return 1 on any failure."""
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.fsync = lambda _: None  # type: ignore[assignment] # the disk is not tested here
    with tempfile.TemporaryDirectory() as directory:
        tempfile.tempdir = directory
        bases = [make_base(method, Path(directory) / method) for method in _METHODS]
        kinds: dict[str, Callable[[Path, random.Random], object]] = {
            mutation.__name__: partial(damage, mutation) for mutation in DAMAGE
        }
        kinds |= {forge.__name__: forge for forge in FORGERIES}
        return fuzz(
            {name: partial(attempt, forge, bases) for name, forge in kinds.items()}, options
        )


if __name__ == "__main__":
    sys.exit(main())
