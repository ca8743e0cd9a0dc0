"""The command line. Imports wait until a command needs them, so that help comes at once."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probmask.errors import (
    InputError,
    LayerCollapseWarning,
    NonFiniteError,
    UnreadableImageWarning,
)
from probmask.launch import is_first_rank, rank_named
from probmask.version import __version__

# Flags of `train` that stand for a key of the configuration.
_FLAGS = {
    "data": "data",
    "data_dir": "data_dir",
    "select_on": "select_on",
    "model": "model",
    "method": "method.name",
    "sparsity": "method.sparsity",
    "epochs": "epochs",
    "batch_size": "batch_size",
    "seed": "seed",
    "devices": "devices",
    "strategy": "strategy",
    "precision": "precision",
    "dense_twin": "dense_twin",
}


# What `probmask[train]` installs, by the names it is imported under.
_EXTRAS = ("PIL", "lightning_fabric", "rich", "sklearn", "tensorboard", "tomli_w")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 when done, 1 when it failed while working, 2 when the input is wrong."""
    if "" not in sys.path:  # the working directory, where a user's own network lies
        sys.path.append("")
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        with warnings.catch_warnings():
            _show_warnings_in_one_line()
            command(options)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        _say(f"{error.name} is not installed; pip install 'probmask[train]'.")
        return 2
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, NonFiniteError) as error:  # a NaN is of our own making, not of the input
        _say(str(error), every_rank=True)
        return 1
    except InputError as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        print("probmask: interrupted; --resume DIR goes on from the checkpoint", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="probmask", description="Train neural networks to an exact sparsity, and use them."
    )
    parser.add_argument("--version", action="version", version=f"probmask {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_train(commands)

    evaluate = commands.add_parser("evaluate", help="measure the accuracy of a finished network")
    evaluate.add_argument("artifact", type=Path, metavar="ARTIFACT", help="a model.safetensors")
    evaluate.add_argument("--data", help="data set (default: the one it was trained on)")
    _add_data_place(evaluate)
    evaluate.add_argument(
        "--model", help="package.module:function, if the network is your own and you trust it"
    )
    evaluate.set_defaults(command=_evaluate)

    inspect = commands.add_parser("inspect", help="show what a finished network kept, by layer")
    inspect.add_argument("artifact", type=Path, metavar="ARTIFACT", help="a model.safetensors")
    inspect.set_defaults(command=_inspect)

    listing = commands.add_parser("list", help="list the methods, models or data sets there are")
    listing.add_argument("what", choices=("methods", "models", "data"))
    listing.add_argument("--markdown", action="store_true", help="print a Markdown table")
    listing.set_defaults(command=_list)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON, for machines")
    return parser


def _add_data_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data-dir", metavar="DIR", help="where the data set lies")
    command.add_argument(
        "--download", action="store_true", help="fetch the data set first if it is not there"
    )


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a sparse network",
        description="Train a sparse network. Without arguments: a small convolutional network on "
        "handwritten digits at 98 % sparsity, next to its dense twin.",
    )
    train.add_argument("config", nargs="?", type=Path, metavar="RUN.toml", help="configuration")
    train.add_argument("--data", help="data set: see 'probmask list data'")
    _add_data_place(train)
    train.add_argument(
        "--select-on",
        metavar="val|test|none",
        help="what runs are compared by: training images that are held out (val, the default), "
        "the test images, or nothing, so that all training images train",
    )
    train.add_argument("--model", help="a name, or package.module:function for your own")
    train.add_argument("--method", help="see 'probmask list methods'")
    train.add_argument("--sparsity", type=float, help="fraction of the weights removed, in [0, 1)")
    train.add_argument("--epochs", type=int, help="passes over the training data")
    train.add_argument("--batch-size", type=int, help="over all devices together")
    train.add_argument("--seed", type=int, help="decides all randomness")
    train.add_argument("--out", type=Path, metavar="DIR", help="directory of the run; must be new")
    train.add_argument("--devices", type=int, metavar="N")
    train.add_argument("--strategy", help="Lightning Fabric's: ddp, …")
    train.add_argument("--precision", help="32-true or bf16-mixed")
    train.add_argument(
        "--dense-twin",
        action=argparse.BooleanOptionalAction,
        help="also train a dense network to compare with (default: for digits)",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="DIR",
        help="go on with the unfinished run in DIR (or in --out)",
    )
    train.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any key of the configuration, as in --set optimizer.lr=0.05",
    )
    train.set_defaults(command=_train)


def _train(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import print_training
    from probmask.training.config import load_config, parse_value
    from probmask.training.progress import Bar, Quiet
    from probmask.training.run_directory import RunDirectory
    from probmask.training.session import train

    overrides = [
        (key, getattr(options, flag))
        for flag, key in _FLAGS.items()
        if getattr(options, flag) is not None
    ]
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set {assignment}: expected KEY=VALUE, as in optimizer.lr=0.05.")
        overrides.append((key, parse_value(value)))
    out = options.out
    resume = options.resume is not None
    if isinstance(options.resume, str):
        if out is not None:
            raise InputError(f"--resume {options.resume} --out {out}: which of the two? Pass one.")
        out = Path(options.resume)
    source = options.config
    if resume and source is None and out is not None and overrides:
        source = RunDirectory(out).config  # what is not given is as the run has it
    given = source is not None or overrides or not resume
    config = load_config(source, overrides) if given else None
    visible = _visible(options)
    if options.download:
        wanted = config or RunDirectory(Path(str(out))).read_config()
        _download(wanted.data, wanted.data_dir, options)
    outcome = train(config, out=out, resume=resume, make_reporter=Bar if visible else Quiet)
    if not is_first_rank():
        return
    if options.json:
        _print_json(
            {"directory": str(outcome.directory), "run": outcome.record, "dense": outcome.dense}
        )
    else:
        print_training(outcome.directory, outcome.record, outcome.dense)


def _evaluate(options: argparse.Namespace) -> None:
    import torch

    from probmask.artifact import load, read
    from probmask.data import default_workers, load_data
    from probmask.training.evaluate import check_fits, evaluate_model
    from probmask.training.run_directory import recorded_place

    artifact = _artifact(options)
    metadata = read(artifact).metadata
    trained_on = metadata.get("data")
    data = options.data or trained_on
    if not isinstance(data, str):
        raise InputError(f"{artifact}: does not say its data set; pass --data.")
    settings = metadata.get("data_args") if data == trained_on else None
    place = options.data_dir or (recorded_place(artifact) if data == trained_on else None)
    if options.download:
        _download(data, place, options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = load_data(data, place, settings if isinstance(settings, dict) else {})
    network = load(artifact, model=options.model).to(device)
    check_fits(network, source, device=device, trained_on=metadata.get("class_names"))
    score = evaluate_model(network, source.to(device, workers=default_workers()), device=device)
    if options.json:
        result = {"data": data, "accuracy": score.accuracy}
        _print_json({**result, "correct": score.correct, "total": score.total})
    else:
        print(f"{data}: {score.accuracy:.2f} % ({score.correct} of {score.total} correct)")


def _artifact(options: argparse.Namespace) -> Path:
    """The artifact, or that of the run whose directory is given."""
    given: Path = options.artifact
    return given / "model.safetensors" if given.is_dir() else given


def _inspect(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import layer_rows, print_layers
    from probmask.artifact import read

    artifact = _artifact(options)
    info = read(artifact)
    if options.json:
        sizes = {"file_bytes": info.file_bytes, "dense_bytes": info.dense_bytes}
        _print_json({**sizes, "layers": layer_rows(info), "metadata": info.metadata})
    else:
        print_layers(artifact, info)


def _list(options: argparse.Namespace) -> None:
    _LISTINGS[options.what](options)


def _list_methods(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import print_rows
    from probmask.methods import METHODS

    described: list[dict[str, Any]] = [
        {
            "name": name,
            "group": method.group,
            "year": method.year,
            "summary": method.summary,
            "reference": method.reference,
        }
        for name, method in METHODS.items()
    ]
    if options.json:
        _print_json(described)
        return
    rows = [
        (row["name"], row["group"], str(row["year"] or "–"), row["summary"]) for row in described
    ]
    print_rows(("name", "group", "year", "what it does"), rows, markdown=options.markdown)


def _list_models(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import MODEL_HEADINGS, model_rows, print_rows
    from probmask.masking.macs import CONVENTION
    from probmask.models.catalogue import describe_models

    described = describe_models()
    if options.json:
        _print_json(described)
        return
    print_rows(
        MODEL_HEADINGS,
        model_rows(described),
        optional=("what it is", "pooling", "parameters"),
        markdown=options.markdown,
    )
    print(f"\n{CONVENTION}")


def _list_data(options: argparse.Namespace) -> None:
    from probmask.analysis.tables import DATA_HEADINGS, data_rows, print_rows
    from probmask.data.catalogue import describe_data

    described = describe_data()
    if options.json:
        _print_json(described)
    else:
        print_rows(
            DATA_HEADINGS,
            data_rows(described),
            optional=("what it is", "download"),
            markdown=options.markdown,
        )


_LISTINGS = {"methods": _list_methods, "models": _list_models, "data": _list_data}


def _download(data: str, directory: str | None, options: argparse.Namespace) -> None:
    from probmask.data import download_data

    # Every rank of a launcher that starts them together, as none may go on without the files; what
    # is there already is not fetched again, and a file gets its name when it is complete.
    download_data(data, directory, visible=_visible(options))


def _visible(options: argparse.Namespace) -> bool:
    """Whether somebody is there to see a bar."""
    return sys.stderr.isatty() and not options.json and is_first_rank()


def _say(message: str, *, every_rank: bool = False) -> None:
    """Print a message: the first rank's, or also what another one alone may know."""
    if is_first_rank():
        print(f"probmask: {message}", file=sys.stderr)
    elif every_rank:
        print(f"probmask (rank {rank_named()}): {message}", file=sys.stderr)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _show_warnings_in_one_line() -> None:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, LayerCollapseWarning | UnreadableImageWarning):
            every_rank = issubclass(category, UnreadableImageWarning)
            _say(f"warning: {message}", every_rank=every_rank)

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
