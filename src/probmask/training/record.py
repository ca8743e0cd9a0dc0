"""The record of a run, from which tables, plots and comparisons are made."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from probmask.data import DataSource
from probmask.masking.distributed import gathered
from probmask.masking.macs import CONVENTION, count_macs
from probmask.masking.method import Phase
from probmask.masking.model_call import move_inputs
from probmask.masking.sites import find_sites
from probmask.masking.summary import Summary
from probmask.training.config import TrainConfig, make_method, to_table
from probmask.training.evaluation import Score, evaluate_model
from probmask.training.record_format import RECORD_FORMAT
from probmask.version import __version__

# Keys of a record that the artifact's header repeats.
_METADATA_KEYS = (
    "model",
    "model_args",
    "data",
    "data_args",
    "image_shape",
    "class_names",
    "method",
    "seed",
    "epochs",
    "sparsity",
    "test",
    "versions",
)


def make_record(
    config: TrainConfig,
    data: DataSource,
    model: nn.Module,
    summary: Summary,
    *,
    model_args: Mapping[str, Any],
    phases: Sequence[Phase],
    updates: int,
    seconds: float,
    device: torch.device,
    devices: int,
    earlier_versions: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    """Measure the finished network; return its record.

    ``updates`` and ``seconds`` are the length of the training, ``devices`` the number of processes
    that shared every batch. ``earlier_versions`` are those of the sessions before this one.
    """
    settings = make_method(config).full_settings()
    return {
        "format": RECORD_FORMAT,
        "model": config.model,
        "model_args": dict(model_args),
        "data": config.data,
        "data_args": _resolved_data_args(data),
        "image_shape": None if data.image_shape is None else list(data.image_shape),
        "class_names": None if data.class_names is None else list(data.class_names),
        "examples": data.examples,
        "train_images": data.train_size,  # or sentences
        "init": _initial_weights(config),
        "method": {"name": config.method["name"], **settings},
        "seed": config.seed,
        "epochs": sum(phase.epochs for phase in phases),
        "phases": [asdict(phase) for phase in phases],
        "updates": updates,
        **_measurements(config, data, model, summary, settings, device),
        "seconds": round(seconds, 3),
        "config": to_table(config),
        "versions": versions(),
        "earlier_versions": [dict(each) for each in earlier_versions],
        "hardware": {
            "machine": platform.machine(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(device),
            "devices": devices,
        },
    }


def artifact_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a record that the artifact's header stores."""
    metadata = {key: record[key] for key in _METADATA_KEYS}
    layers = record["layers"]
    metadata["macs_per_weight"] = {layer["name"]: layer["macs_per_weight"] for layer in layers}
    return metadata


def versions() -> dict[str, str]:
    """Return the versions of everything that influences the result.

    Numba is listed if it is installed, because its kernels round differently.
    """
    found = {
        "probmask": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }
    with suppress(importlib.metadata.PackageNotFoundError):
        found["numba"] = importlib.metadata.version("numba")
    return found


def cpu_name() -> str | None:
    """Return the processor's model name, or None if the system does not provide it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def _measurements(
    config: TrainConfig,
    data: DataSource,
    model: nn.Module,
    summary: Summary,
    settings: Mapping[str, Any],
    device: torch.device,
) -> dict[str, Any]:
    """Return sparsity, MACs and accuracy of the finished network."""
    masked = {layer.name for layer in summary.layers}
    found = find_sites(model, include=config.include, exclude=config.exclude)
    sites = [site for site in found if site.name in masked]  # frozen = "skip" leaves out others
    macs = count_macs(model, sites, move_inputs(data.example(), device))
    kept = [layer.kept for layer in summary.layers]
    sparse = macs.sparse(kept)
    # The sparsity asked for is a fraction of FLOPs or of weights.
    reached = 1 - sparse / macs.dense if settings.get("cost") == "flops" else summary.sparsity
    test = evaluate_model(model, data, device=device)
    selection = _selection_score(config, data, model, test, device)
    return {
        "sparsity": {"asked": settings["sparsity"], "reached": reached},
        "kept": summary.kept,
        "size": summary.size,
        "network": {  # with the tensors of two or more dimensions that are not masked
            "kept": summary.network.kept,
            "size": summary.network.size,
            "sparsity": summary.network.sparsity,
        },
        "macs": {
            "dense": macs.dense,
            "sparse": sparse,
            "pooling": macs.pooling,
            "dense_with_pooling": macs.dense_with_pooling,
            "sparse_with_pooling": macs.sparse_with_pooling(kept),
            "convention": CONVENTION,
            "example": data.example_text,
        },
        "selection": selection and {"on": config.select_on, **selection.as_table()},
        "test": test.as_table(),
        "unreadable": sorted(set().union(*gathered(data.unreadable))),
        "layers": [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "kept": layer.kept,
                "size": layer.size,
                "sparsity": layer.sparsity,
                "macs_per_weight": per_weight,
            }
            for layer, per_weight in zip(summary.layers, macs.per_weight, strict=True)
        ],
    }


def _initial_weights(config: TrainConfig) -> dict[str, Any] | None:
    """Return the name and the digest of the file that the training started from."""
    if config.init is None:
        return None
    return {"file": Path(config.init).name, "sha256": config.init_sha256}


def _selection_score(
    config: TrainConfig, data: DataSource, model: nn.Module, test: Score, device: torch.device
) -> Score | None:
    """Return the score by which runs are compared when one of them is selected."""
    if config.select_on == "val":
        return evaluate_model(model, data, part="val", device=device)
    return test if config.select_on == "test" else None


def _resolved_data_args(data: DataSource) -> dict[str, Any]:
    """Return the settings of the data, defaults included, so that they can be reused."""
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(data.settings).items()
        if value is not None
    }
