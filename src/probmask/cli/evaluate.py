"""`probmask evaluate`: measure the test accuracy of a finished network."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from probmask.checks import is_number
from probmask.cli.arguments import (
    add_artifact,
    add_data_location,
    add_model,
    artifact_path,
    as_written,
    download,
    model_to_import,
)
from probmask.cli.terminal import format_setting, print_json, print_text
from probmask.errors import InputError

if TYPE_CHECKING:
    from torch import nn

# Settings of data sets that do not affect the test examples.
_TRAINING_ONLY = (
    "flip",
    "padding",
    "train_images",
    "validation_images",
    "train_sentences",
    "validation_sentences",
    "tokenizer_sha256",
)


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    evaluate = commands.add_parser(
        "evaluate",
        help="measure the accuracy of a finished network",
        description="Measure the accuracy of a finished network on the test part of its data set, "
        "and compare it with the recorded accuracy.",
    )
    add_artifact(evaluate)
    evaluate.add_argument("--data", help="data set (default: as in training)")
    add_data_location(evaluate)
    add_model(evaluate)
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of data_args, as in --set data_args.test_images=100; may be repeated "
        "(default: as in training)",
    )
    evaluate.add_argument(
        "--engine",
        choices=("pytorch", "sparse"),
        default="pytorch",
        help="what runs the network; sparse: probmask's engine on the CPU (default: %(default)s)",
    )
    evaluate.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Load the network, count its correct predictions and print the accuracy."""
    import torch

    from probmask.artifact import load, read
    from probmask.data import default_workers, load_data
    from probmask.training.evaluation import check_fits, evaluate_model
    from probmask.training.origins import Origins
    from probmask.training.run_directory import recorded_place

    artifact = artifact_path(options)
    metadata = read(artifact).metadata
    trained_on = metadata.get("data")
    data = options.data or trained_on
    if not isinstance(data, str):
        raise InputError(f"{artifact}: the file does not name its data set; pass --data.")
    recorded = metadata.get("data_args") if data == trained_on else None
    in_training = recorded if isinstance(recorded, dict) else {}
    settings = in_training | _data_settings(options.set)
    directory = options.data_dir or (recorded_place(artifact) if data == trained_on else None)
    if options.download:
        download(data, directory, options)
    sparse = options.engine == "sparse"
    device = torch.device("cuda" if torch.cuda.is_available() and not sparse else "cpu")
    with Origins(written=as_written(options, {})).named():
        source = load_data(data, directory, settings)
    network = load(artifact, model=model_to_import(options)).to(device)
    check_fits(network, source, device=device, trained_on=metadata.get("class_names"))
    if sparse:
        if source.image_shape is None:
            raise InputError(
                f"--engine sparse: the engine takes images, but {data} has {source.examples}; omit "
                "it to evaluate with PyTorch."
            )
        network = _compiled(network, source.image_shape)
    score = evaluate_model(network, source.to(device, workers=default_workers()), device=device)
    result = {"data": data, **score.as_table()}
    comparable = data == trained_on and _test_settings(settings) == _test_settings(in_training)
    before = _recorded_score(metadata.get("test")) if comparable else None
    if options.json:
        used = {key: value for key, value in asdict(source.settings).items() if value is not None}
        print_json({**result, "data_args": used, "recorded": before})
        return
    print_text(f"{data}: {_score_text(result)}{_difference(result, before)}")
    conditions = _settings_text(data, settings, in_training)
    if conditions:
        print_text(conditions)


def _compiled(network: "nn.Module", image_shape: Sequence[int]) -> "nn.Module":
    """Compile the network for the sparse engine, tuned to the batch size of `evaluate_model`."""
    from probmask.runtime import compile as compile_engine
    from probmask.runtime.run.engine import EngineModule
    from probmask.runtime.speed import random_inputs

    return EngineModule(compile_engine(network, random_inputs(image_shape, 16)))


def _data_settings(assignments: Sequence[str]) -> dict[str, Any]:
    """Parse ``data_args.NAME=VALUE`` assignments."""
    from probmask.training.config import parse_value

    settings = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        table, dot, name = key.partition(".")
        if not equals or not dot or table != "data_args":
            raise InputError(
                f"--set {assignment}: expected a key of data_args, as in data_args.test_images=100."
            )
        settings[name] = parse_value(value, source=f"--set {key}")
    return settings


def _test_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the test examples."""
    return {
        key: value
        for key, value in settings.items()
        if key not in _TRAINING_ONLY and value != "none"
    }


def _recorded_score(recorded: Any) -> dict[str, Any] | None:
    """Return the accuracy stored in the file, or None if it is not well-formed."""
    if not isinstance(recorded, Mapping):
        return None
    counts = [recorded.get("correct"), recorded.get("total")]
    if not all(type(count) is int for count in counts) or not is_number(recorded.get("accuracy")):
        return None
    return {key: recorded[key] for key in ("correct", "total", "accuracy")}


def _score_text(score: Mapping[str, Any]) -> str:
    return f"{score['accuracy']:.2f} % ({score['correct']} of {score['total']} correct)"


def _difference(found: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> str:
    if recorded is None:
        return ""
    same = all(found[key] == recorded[key] for key in ("correct", "total"))
    return ", as recorded" if same else f"; recorded: {_score_text(recorded)}"


def _settings_text(
    data: str, settings: Mapping[str, Any], in_training: Mapping[str, Any]
) -> str | None:
    """Describe the settings of the test part that differ from the defaults or from training."""
    from probmask.data import check_settings

    defaults = asdict(check_settings(data, {}))
    used = asdict(check_settings(data, settings))
    before = defaults | dict(in_training)
    words = []
    for key, value in used.items():
        now, then = (list(v) if isinstance(v, tuple) else v for v in (value, before[key]))
        if key in _TRAINING_ONLY or (value == defaults[key] and now == then):
            continue
        origin = "as in training" if now == then else f"in training: {format_setting(then)}"
        words.append(f"{key} = {format_setting(now)} ({origin})")
    return f"with {', '.join(words)}" if words else None
