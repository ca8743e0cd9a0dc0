"""`probmask train`: train a sparse network."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.checks import check_sparsity
from probmask.commands.assignments import add_assignments, assignments_of
from probmask.commands.data_place import add_data_place, fetch
from probmask.commands.output import print_json, say, visible
from probmask.errors import InputError
from probmask.launch import is_first_rank

if TYPE_CHECKING:
    from probmask.training.loop import MakeReporter

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


def add(commands: Any) -> None:
    """Add the command and its flags."""
    train = commands.add_parser(
        "train",
        help="train a sparse network",
        description="Train a sparse network. Without arguments: a small convolutional network on "
        "handwritten digits at 98 % sparsity, next to its dense twin.",
    )
    train.add_argument("config", nargs="?", type=Path, metavar="RUN.toml", help="configuration")
    train.add_argument("--data", help="data set: see 'probmask list data'")
    add_data_place(train)
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
    add_assignments(train)
    train.add_argument("--quiet", action="store_true", help="show no progress, only what came out")
    train.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Train as the file and the flags say; print what came out."""
    from probmask.analysis.tables import print_training
    from probmask.training.config import load_config
    from probmask.training.run import train
    from probmask.training.run_directory import RunDirectory

    _drop_sparsity_of_dense(options)
    overrides = [
        (key, getattr(options, flag))
        for flag, key in _FLAGS.items()
        if getattr(options, flag) is not None
    ]
    overrides += assignments_of(options)
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
    if options.download:
        wanted = config or RunDirectory(Path(str(out))).read_config()
        fetch(wanted.data, wanted.data_dir, options)
    finished = resume and out is not None and RunDirectory(out).finished
    outcome = train(config, out=out, resume=resume, make_reporter=_reporter(options))
    if not is_first_rank():
        return
    if finished:
        say(f"{out}: finished already; this is what came out of it.")
    if options.json:
        print_json(
            {"directory": str(outcome.directory), "run": outcome.record, "dense": outcome.dense}
        )
    else:
        print_training(outcome.directory, outcome.record, outcome.dense)


def _reporter(options: argparse.Namespace) -> "MakeReporter":
    """A bar in a terminal, lines elsewhere; nothing for machines and for who wants it quiet."""
    from probmask.training.progress import Bar, Lines, Quiet

    if options.json or options.quiet or not is_first_rank():
        return Quiet
    return Bar if visible(options) else Lines


def _drop_sparsity_of_dense(options: argparse.Namespace) -> None:
    """Let one line with --sparsity serve for all methods, the dense one included; say so."""
    if options.method == "dense" and options.sparsity:
        check_sparsity("Dense", options.sparsity)
        say(f"--method dense removes nothing: --sparsity {options.sparsity:g} is left out.")
        options.sparsity = None
