"""Synthetic records in the format of real ones, for tests of tables and pages."""

import json
import math
import random
from pathlib import Path

from probmask.analysis.records import Run
from probmask.training.record_format import RECORD_FORMAT

LAYERS = {
    "stem.weight": 432,
    "body.0.weight": 9216,
    "body.1.weight": 36864,
    "classifier.weight": 640,
}
USES = {"stem.weight": 256, "body.0.weight": 64, "body.1.weight": 16, "classifier.weight": 1}
SKILL = {"dense": 4.0, "probmask": 3.0, "gmp": 1.5, "rigl": 1.0, "str": 2.0}


def record(method="probmask", sparsity=0.98, seed=0, *, epochs=30, accuracy=None, **changes):
    """Return a record whose accuracy depends on the method, the sparsity and the seed."""
    chance = random.Random(f"{method} {sparsity} {seed}")
    if accuracy is None:
        skill = SKILL.get(method, chance.random())
        accuracy = round(70 + skill + 6 * math.log10(1 - sparsity) + chance.gauss(0, 0.3), 2)
    size = sum(LAYERS.values())
    kept = kept_by_layer(size - round(sparsity * size), chance)
    macs = sum(kept[name] * USES[name] for name in LAYERS)
    name, *settings = method.split()
    made = {
        "format": RECORD_FORMAT,
        "model": "resnet14",
        "model_args": {"classes": 10, "channels": 3},
        "data": "cifar10",
        "train_images": 10000,
        "method": {
            "name": name,
            "sparsity": sparsity,
            **dict(setting.split("=") for setting in settings),
        },
        "seed": seed,
        "epochs": epochs,
        "updates": 78 * epochs,
        "sparsity": {"asked": sparsity, "reached": 1 - sum(kept.values()) / size},
        "kept": sum(kept.values()),
        "size": size,
        "macs": {"dense": sum(LAYERS[n] * USES[n] for n in LAYERS), "sparse": macs},
        "selection": None,
        "test": {"correct": round(100 * accuracy), "total": 10000, "accuracy": accuracy},
        "layers": [
            {
                "name": layer,
                "shape": [count, 1, 1, 1],
                "kept": kept[layer],
                "size": count,
                "sparsity": 1 - kept[layer] / count,
                "macs_per_weight": USES[layer],
            }
            for layer, count in LAYERS.items()
        ],
        "seconds": 300.0 + seed,
        "config": {
            "data": "cifar10",
            "data_dir": "/somewhere/cifar",
            "model": "resnet14",
            "method": {"name": name, "sparsity": sparsity},
            "epochs": epochs,
            "batch_size": 128,
            "seed": seed,
            "optimizer": {"lr": 0.1, "momentum": 0.9},
        },
        "versions": {"probmask": "0.1.0", "torch": "2.13.0"},
        "hardware": {"machine": "x86_64", "cores": 2, "threads": 1},
        "bytes": 4 * sum(kept.values()) + 30_000,
        "history": history(name, epochs, accuracy, size),
    }
    return {**made, **changes}


def held_out(accuracy):
    """Return the "selection" of a run that held out validation images."""
    return {"on": "val", "correct": round(10 * accuracy), "total": 1000, "accuracy": accuracy}


def kept_by_layer(keep, chance):
    """Distribute the budget over the layers at random, exactly."""
    shares = {name: count * (0.5 + chance.random()) for name, count in LAYERS.items()}
    whole = sum(shares.values())
    kept = {name: min(LAYERS[name], int(keep * share / whole)) for name, share in shares.items()}
    for name in sorted(LAYERS, key=LAYERS.__getitem__, reverse=True):
        kept[name] += min(LAYERS[name] - kept[name], keep - sum(kept.values()))
    return kept


def history(method, epochs, accuracy, size):
    lines = []
    for epoch in range(1, epochs + 1):
        done = epoch / epochs
        line = {
            "step": 78 * epoch,
            "epoch": epoch,
            "loss": 2.3 - 1.3 * done**0.5,
            "train_accuracy": 10 + (accuracy - 5) * done**0.5,
            "learning_rate": 0.05 * (1 + math.cos(math.pi * done)),
        }
        if method == "probmask":
            ends = [int(size * (0.1 + 0.85 * done)), int(size * 0.02)]
            inside = (size - sum(ends)) // 18
            counts = [ends[0], *[inside] * 18, ends[1]]
            line["histograms"] = {"prob": {"low": 0, "high": 1, "counts": counts}}
        lines.append(line)
    return lines


def write(directory: Path, made) -> Path:
    """Write a record to the path of a run with this name."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "record.json").write_text(json.dumps(made), encoding="utf-8")
    return directory


def thousands(**changes):
    """Return two thousand runs: 25 methods, four sparsities, twenty seeds."""
    methods = ["probmask", *(f"gmp power={n}" for n in range(24))]
    return [
        Run(
            Path(f"/runs/{index}-{sparsity}-{seed}/record.json"),
            record(method, sparsity, seed, **changes),
        )
        for index, method in enumerate(methods)
        for sparsity in (0.8, 0.9, 0.95, 0.98)
        for seed in range(20)
    ]


def write_grid(root: Path, methods=SKILL, sparsities=(0.9, 0.95, 0.98), seeds=(0, 1), **changes):
    """Write runs of every method, sparsity and seed, and dense ones."""
    for method in methods:
        for sparsity in (0.0,) if method == "dense" else sparsities:
            for seed in seeds:
                name = f"{method}-{sparsity}-seed{seed}".replace(" ", "-")
                write(root / name, record(method, sparsity, seed, **changes))
    return root
