"""Claim: 10,000 damaged and forged records and run directories cause no traceback and no hang.

The mutants are records of all formats, metrics logs, and whole run directories: of a finished run,
and of one that stopped in its last epoch. Every command that reads them runs on each mutant, in
this process, with limits on time and memory.

    python benchmarks/fuzz_records.py
"""

import json
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from fuzzing import (
    ACCEPTED,
    DAMAGE,
    TOML_EDITS,
    Attempt,
    Mutation,
    edit_json_text,
    edited,
    fuzz,
    json_bytes,
    parse_options,
    run_command,
    several,
    unchanged,
)
from probmask.errors import InputError, LayerCollapseWarning
from probmask.training.config import TrainConfig, load_config
from probmask.training.progress import Quiet, Status
from probmask.training.run_directory import RunDirectory
from probmask.training.trainer import train

_COMMITTED = Path(__file__).parents[1] / "docs" / "results" / "records"
_WORDS = ("tied", "learned", "paper", "adaptive", "probmask", "feather", "val", "flops", 0.98, 3, 4)
_SETTINGS = {
    "model_args.width": 4,
    "data_args.train_images": 256,
    "data_args.test_images": 64,
    "data_args.validation_images": 64,
    "batch_size": 128,
    "epochs": 2,
    "dense_twin": False,
    "tensorboard": False,
    "checkpoint_seconds": 0.0,
}


def config_of_base() -> TrainConfig:
    """Return the configuration of the intact run, which trains in a second."""
    return load_config(None, list(_SETTINGS.items()))


class StopInLastEpoch(Quiet):
    """Interrupts the training in its last epoch, after a checkpoint."""

    def show(self, status: Status) -> None:
        """Raise in the second half of the last epoch."""
        if status.epoch == status.epochs and status.step > 3:
            raise KeyboardInterrupt


def edit_record(content: bytes, rng: random.Random) -> bytes:
    """Change one to three nodes of a record; its history is shortened so that all are likely."""
    tree = json.loads(content)
    tree["history"] = tree["history"][-2:]
    for _ in range(rng.randint(1, 3)):
        tree = edited(tree, rng, _WORDS)
    return json_bytes(tree)


def edit_log(content: bytes, rng: random.Random) -> bytes:
    """Change a node of a line of a metrics log."""
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(edited(json.loads(lines[at]), rng, _WORDS)).encode()
    return b"\n".join(lines) + b"\n"


damage: Mutation = several(DAMAGE)


def read_record(
    path: Path, mutation: Mutation, contents: Sequence[bytes], rng: random.Random
) -> str:
    """Compare and report a mutant together with an intact record."""
    intact, base = rng.sample(contents, 2)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    (path / "record.json").write_bytes(mutation(base, rng))
    (path / "intact.json").write_bytes(intact)
    forms = rng.choice(["text", "markdown", "csv", "json"])
    results = [
        run_command(["compare", str(path), "--format", forms]),
        run_command(["compare", str(path), "--on", "val"]),
        run_command(["report", str(path), "--out", str(path / "page.html")]),
    ]
    assert results[0] == results[2], results
    return results[0]


def read_log(base: Path, path: Path, mutation: Mutation, rng: random.Random) -> str:
    """Watch an unfinished run with a mutated log."""
    _copy(base, path)
    log = path / "metrics.jsonl"
    log.write_bytes(mutation(log.read_bytes(), rng))
    return _worst(run_command(["watch", str(path), *more]) for more in (["--once"], ["--json"]))


def read_directory(bases: Sequence[Path], path: Path, rng: random.Random) -> str:
    """Mutate some files of a run together, then read it and resume it."""
    _copy(rng.choice(bases), path)
    mutations: dict[str, Sequence[Mutation]] = {
        "config.toml": (*TOML_EDITS, damage),
        "record.json": (edit_record, edit_json_text, damage),
        "metrics.jsonl": (edit_log, edit_json_text, damage),
        "model.safetensors": (damage,),
    }
    present = [name for name in mutations if (path / name).exists()]
    for name in rng.sample(present, rng.randint(1, 2)):
        file = path / name
        file.write_bytes(rng.choice(mutations[name])(file.read_bytes(), rng))
    commands = [["watch", str(path), "--once"], ["watch", str(path.parent), "--once"]]
    if (path / "record.json").exists():
        commands += [["inspect", str(path)], ["compare", str(path)]]
        commands += [["report", str(path), "--out", str(path / "page.html")]]
    if _resumes_alone(path):
        commands += [["train", "--resume", str(path), "--quiet"]]
    return _worst(map(run_command, commands))


def _copy(base: Path, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(base, path)


def _worst(results: Iterable[str]) -> str:
    found = list(results)
    return next((result for result in found if result != ACCEPTED), ACCEPTED)


def _resumes_alone(path: Path) -> bool:
    """Return whether the run starts no other processes, and trains no dense twin first."""
    try:
        config = RunDirectory(path).read_config()
    except InputError:
        return True
    alone = (config.devices, config.strategy, config.workers) == (1, "auto", None)
    return alone and not config.dense_twin


def make_attempts(root: Path) -> dict[str, Attempt]:
    """Train the intact runs and check that they are accepted; return the attempts.

    All files are below `root`.
    """
    finished, stopped, mutant = root / "finished", root / "stopped", root / "runs" / "mutant"
    train(config_of_base(), out=finished)
    with suppress(KeyboardInterrupt):
        train(config_of_base(), out=stopped, make_reporter=StopInLastEpoch)
    assert (stopped / "checkpoint.safetensors").exists()
    new = (finished / "record.json").read_bytes()
    old = [path.read_bytes() for path in sorted(_COMMITTED.glob("*.json"))[::9]]
    by_key = [json_bytes(json.loads(content)) for content in (new, *old)]
    records, logs = partial(read_record, mutant), partial(read_log, stopped, mutant)
    assert records(unchanged, [new, *old], random.Random(0)) == ACCEPTED
    assert logs(unchanged, random.Random(0)) == ACCEPTED
    return {
        "record, damaged": partial(records, damage, [new, *old]),
        "record, edited": partial(records, edit_record, [new, *old]),
        "old record, edited": partial(records, edit_record, old),
        "record, odd text": partial(records, several([edit_json_text]), by_key),
        "log, damaged": partial(logs, damage),
        "log, edited": partial(logs, edit_log),
        "log, odd text": partial(logs, several([edit_json_text])),
        "run directory": partial(read_directory, [finished, stopped], mutant),
    }


def main() -> int:
    """Print the number of results for each kind of mutation. Return 1 on any failure."""
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", LayerCollapseWarning)  # the network is tiny
    with tempfile.TemporaryDirectory() as directory:
        return fuzz(make_attempts(Path(directory)), options)


if __name__ == "__main__":
    sys.exit(main())
