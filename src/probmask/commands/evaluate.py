"""`probmask evaluate`: measure the accuracy of a finished network."""

import argparse
from typing import Any

from probmask.commands.artifact_argument import add_artifact, artifact_of
from probmask.commands.data_place import add_data_place, fetch
from probmask.commands.output import print_json
from probmask.errors import InputError


def add(commands: Any) -> None:
    """Add the command and its flags."""
    evaluate = commands.add_parser("evaluate", help="measure the accuracy of a finished network")
    add_artifact(evaluate)
    evaluate.add_argument("--data", help="data set (default: the one it was trained on)")
    add_data_place(evaluate)
    evaluate.add_argument(
        "--model", help="package.module:function, if the network is your own and you trust it"
    )
    evaluate.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Load the network and count its correct answers."""
    import torch

    from probmask.artifact import load, read
    from probmask.data import default_workers, load_data
    from probmask.training.evaluate import check_fits, evaluate_model
    from probmask.training.run_directory import recorded_place

    artifact = artifact_of(options)
    metadata = read(artifact).metadata
    trained_on = metadata.get("data")
    data = options.data or trained_on
    if not isinstance(data, str):
        raise InputError(f"{artifact}: does not say its data set; pass --data.")
    settings = metadata.get("data_args") if data == trained_on else None
    place = options.data_dir or (recorded_place(artifact) if data == trained_on else None)
    if options.download:
        fetch(data, place, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = load_data(data, place, settings if isinstance(settings, dict) else {})
    network = load(artifact, model=options.model).to(device)
    check_fits(network, source, device=device, trained_on=metadata.get("class_names"))
    score = evaluate_model(network, source.to(device, workers=default_workers()), device=device)
    if options.json:
        result = {"data": data, "accuracy": score.accuracy}
        print_json({**result, "correct": score.correct, "total": score.total})
    else:
        print(f"{data}: {score.accuracy:.2f} % ({score.correct} of {score.total} correct)")
