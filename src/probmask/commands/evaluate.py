"""`probmask evaluate`: measure the accuracy of a finished network."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from probmask.checks import is_number
from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.data_place import add_data_place, fetch
from probmask.commands.output import print_json
from probmask.errors import InputError

if TYPE_CHECKING:
    from torch import nn

# Settings of data sets that test images do not depend on.
_TRAINING_ONLY = ("flip", "padding", "train_images", "validation_images")


def add(commands: Any) -> None:
    """Add the command and its flags."""
    evaluate = commands.add_parser("evaluate", help="measure the accuracy of a finished network")
    add_artifact(evaluate)
    evaluate.add_argument("--data", help="data set (default: the one it was trained on)")
    add_data_place(evaluate)
    evaluate.add_argument(
        "--model", help="package.module:function, if the network is your own and you trust it"
    )
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the data, as in --set data_args.test_images=100 (default: as in "
        "training)",
    )
    evaluate.add_argument(
        "--engine",
        choices=("pytorch", "sparse"),
        default="pytorch",
        help="what computes the answers (sparse: probmask's kernels, on the CPU)",
    )
    evaluate.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Load the network and count its correct answers."""
    import torch

    from probmask.artifact import load, read
    from probmask.data import default_workers, load_data
    from probmask.training.evaluation import check_fits, evaluate_model
    from probmask.training.run_directory import recorded_place

    artifact = artifact_of(options)
    metadata = read(artifact).metadata
    trained_on = metadata.get("data")
    data = options.data or trained_on
    if not isinstance(data, str):
        raise InputError(f"{artifact}: does not say its data set; pass --data.")
    recorded = metadata.get("data_args") if data == trained_on else None
    in_training = recorded if isinstance(recorded, dict) else {}
    settings = in_training | _assignments(options.set)
    place = options.data_dir or (recorded_place(artifact) if data == trained_on else None)
    if options.download:
        fetch(data, place, options)
    sparse = options.engine == "sparse"
    device = torch.device("cuda" if torch.cuda.is_available() and not sparse else "cpu")
    source = load_data(data, place, settings)
    network = load(artifact, model=options.model).to(device)
    check_fits(network, source, device=device, trained_on=metadata.get("class_names"))
    if sparse:
        network = _compiled(network, source.image_shape)
    score = evaluate_model(network, source.to(device, workers=default_workers()), device=device)
    result = {"data": data, **score.as_table()}
    comparable = data == trained_on and _testing(settings) == _testing(in_training)
    before = _score(metadata.get("test")) if comparable else None
    if options.json:
        used = {key: value for key, value in asdict(source.settings).items() if value is not None}
        print_json({**result, "data_args": used, "recorded": before})
        return
    print(f"{data}: {_shown(result)}{_compared(result, before)}")
    conditions = _settings_shown(data, settings, in_training)
    if conditions:
        print(conditions)


def _compiled(network: "nn.Module", image_shape: Sequence[int]) -> "nn.Module":
    """The network on the sparse kernels, fast at batches as `evaluate_model` makes them."""
    from probmask.runtime import compile as compile_engine
    from probmask.runtime.run.engine import EngineModule
    from probmask.runtime.speed import random_inputs

    return EngineModule(compile_engine(network, random_inputs(image_shape, 16)))


def _assignments(given: Sequence[str]) -> dict[str, Any]:
    """The settings of the data that flags give, by name."""
    from probmask.training.config import parse_value

    settings = {}
    for assignment in given:
        key, equals, value = assignment.partition("=")
        table, dot, name = key.partition(".")
        if not equals or not dot or table != "data_args":
            raise InputError(
                f"--set {assignment}: expected a setting of the data, as in "
                "data_args.test_images=100."
            )
        settings[name] = parse_value(value)
    return settings


def _testing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide what the test images are."""
    return {
        key: value
        for key, value in settings.items()
        if key not in _TRAINING_ONLY and value != "none"
    }


def _score(recorded: Any) -> dict[str, Any] | None:
    """What the file says of its accuracy, which may be anything."""
    if not isinstance(recorded, Mapping):
        return None
    counts = [recorded.get("correct"), recorded.get("total")]
    if not all(type(count) is int for count in counts) or not is_number(recorded.get("accuracy")):
        return None
    return {key: recorded[key] for key in ("correct", "total", "accuracy")}


def _shown(score: Mapping[str, Any]) -> str:
    return f"{score['accuracy']:.2f} % ({score['correct']} of {score['total']} correct)"


def _compared(found: Mapping[str, Any], recorded: Mapping[str, Any] | None) -> str:
    if recorded is None:
        return ""
    same = all(found[key] == recorded[key] for key in ("correct", "total"))
    return ", as recorded" if same else f"; recorded: {_shown(recorded)}"


def _settings_shown(
    data: str, settings: Mapping[str, Any], in_training: Mapping[str, Any]
) -> str | None:
    """Which settings the test images were taken with, where they are not the data's own."""
    from probmask.data import check_settings

    usual = asdict(check_settings(data, {}))
    used = asdict(check_settings(data, settings))
    before = usual | dict(in_training)
    words = []
    for key, value in used.items():
        now, then = (list(v) if isinstance(v, tuple) else v for v in (value, before[key]))
        if key in _TRAINING_ONLY or (value == usual[key] and now == then):
            continue
        origin = "as in training" if now == then else f"in training: {_plain(then)}"
        words.append(f"{key} = {_plain(now)} ({origin})")
    return f"with {', '.join(words)}" if words else None


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)
