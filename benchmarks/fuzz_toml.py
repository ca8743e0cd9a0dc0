"""Claim: 10,000 damaged and forged TOML files and --set values cause no traceback and no hang.

The mutants are configurations of runs, grids of sweeps, and experiments. Each is read by the public
functions and by the commands that read it, with limits on time and memory. No mutant is trained.

    python benchmarks/fuzz_toml.py
"""

import random
import sys
import tempfile
from functools import partial
from pathlib import Path

import tomli_w

from fuzzing import (
    ACCEPTED,
    DAMAGE,
    TOML_EDITS,
    Attempt,
    Mutation,
    edit_toml_value,
    fuzz,
    parse_options,
    run_command,
    several,
    unchanged,
)
from probmask.analysis.experiments import load_experiment
from probmask.sweeps.grid import expand, load_grid
from probmask.training.config import load_config, to_table

_EXPERIMENTS = Path(__file__).parents[1] / "experiments"
_GRID = """\
[run]
data = "digits"
epochs = 3
model_args.width = 8
optimizer = { lr = 0.1, momentum = 0.9 }

[grid]
method = ["probmask-tied", { name = "gmp", ramp_begin = 0.1 }]
sparsity = [0.9, 0.98]
seed = [0, 1]
optimizer.lr = [0.1, 0.2]
"""
_KEYS = (
    *("epochs", "seed", "threads", "batch_size", "optimizer.lr", "optimizer", "method"),
    *("method.name", "method.sparsity", "data", "data_args.train_images", "data_args.mean"),
    *("model", "model_args.width", "include", "label_smoothing", "a.b", "", ".", "\x1b[2J"),
)
damage: Mutation = several(DAMAGE)
edit: Mutation = several(TOML_EDITS)


def read_config(mutation: Mutation, content: bytes, path: Path, rng: random.Random) -> str:
    """Read the configuration of a run, and watch its directory."""
    (path / "run").mkdir(exist_ok=True)
    file = path / "run" / "config.toml"
    file.write_bytes(mutation(content, rng))
    watched = run_command(["watch", str(path / "run"), "--once"])
    load_config(file)
    assert watched == ACCEPTED, watched
    return watched


def read_grid(mutation: Mutation, content: bytes, path: Path, rng: random.Random) -> str:
    """Read the grid of a sweep, and plan the sweep."""
    file = path / "grid.toml"
    file.write_bytes(mutation(content, rng))
    planned = run_command(["sweep", str(file), "--dry-run", "--out", str(path / "sweep")])
    load_grid(file)
    return planned


def read_experiment(mutation: Mutation, path: Path, rng: random.Random) -> str:
    """Read an experiment and expand its runs."""
    original = rng.choice(sorted(_EXPERIMENTS.glob("*.toml")))
    file = path / original.name
    file.write_bytes(mutation(original.read_bytes(), rng))
    experiment = load_experiment(file)
    for scale in experiment.scales:
        expand(experiment.sweep(scale), source=str(file))
        assert experiment.minutes(scale) >= 0
        assert experiment.hardware(scale)
    return ACCEPTED


def read_assignment(path: Path, rng: random.Random) -> str:
    """Pass a key and a value as --set to a sweep that trains nothing."""
    file = path / "intact.toml"
    file.write_text(_GRID)
    line = edit_toml_value(b"key = 1", rng).decode().removeprefix("key = ").replace("\0", "")
    key = rng.choice(_KEYS)
    sweep = ["sweep", str(file), "--dry-run", "--out", str(path / "sweep")]
    return run_command([*sweep, "--set", f"{key}={line}"])


def make_attempts(path: Path) -> dict[str, Attempt]:
    """Check that the intact files are accepted; return the attempts, which write below `path`."""
    full = tomli_w.dumps(to_table(load_config(None))).encode()
    grid, rng = _GRID.encode(), random.Random(0)
    assert read_config(unchanged, full, path, rng) == ACCEPTED
    assert read_grid(unchanged, grid, path, rng) == ACCEPTED
    assert read_experiment(unchanged, path, rng) == ACCEPTED
    return {
        "configuration, damaged": partial(read_config, damage, full, path),
        "configuration, edited": partial(read_config, edit, full, path),
        "grid, damaged": partial(read_grid, damage, grid, path),
        "grid, edited": partial(read_grid, edit, grid, path),
        "experiment, damaged": partial(read_experiment, damage, path),
        "experiment, edited": partial(read_experiment, edit, path),
        "--set": partial(read_assignment, path),
    }


def main() -> int:
    """Print the number of results for each kind of mutation. Return 1 on any failure."""
    options = parse_options(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        return fuzz(make_attempts(Path(directory)), options)


if __name__ == "__main__":
    sys.exit(main())
