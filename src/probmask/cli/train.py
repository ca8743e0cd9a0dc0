"""`probmask train`: train a sparse network."""

import argparse
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.arguments import (
    MODEL_NAME_HELP,
    add_assignments,
    add_data_location,
    add_trust,
    as_written,
    assignments,
    check_sparsity_flag,
    download,
)
from probmask.cli.terminal import print_json, print_message, print_training, shows_progress
from probmask.errors import InputError
from probmask.launch import is_first_rank

if TYPE_CHECKING:
    from probmask.training.config import TrainConfig
    from probmask.training.origins import Origins
    from probmask.training.progress import MakeReporter
    from probmask.training.run_directory import RunDirectory
    from probmask.training.trainer import Outcome

# Keys of the configuration by the flag that sets them.
_FLAGS = {
    "data": "data",
    "data_dir": "data_dir",
    "select_on": "select_on",
    "model": "model",
    "init": "init",
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
    """Add the command and its arguments to the parser."""
    train = commands.add_parser(
        "train",
        help="train a sparse network",
        description="Train a sparse network. Without arguments, a small convolutional network is "
        "trained on handwritten digits at 98 % sparsity, together with its dense twin.",
    )
    train.add_argument("config", nargs="?", type=Path, metavar="RUN.toml", help="configuration")
    train.add_argument("--data", help="data set; see 'probmask list data'")
    add_data_location(train)
    train.add_argument(
        "--select-on",
        metavar="val|test|none",
        help="examples on which runs are compared: held-out training examples (val, the default), "
        "test examples (test), or none, which trains on all training examples",
    )
    train.add_argument("--model", help=MODEL_NAME_HELP)
    add_trust(train, "the network and the optimizer that RUN.toml or the resumed run names")
    train.add_argument(
        "--init",
        metavar="FILE",
        help="start from these weights: a safetensors file, an artifact, or a state_dict saved by "
        "PyTorch; or a directory with a model.safetensors",
    )
    train.add_argument("--method", help="sparsification method; see 'probmask list methods'")
    train.add_argument("--sparsity", type=float, help="fraction of the weights pruned, in [0, 1)")
    train.add_argument("--epochs", type=int, help="passes over the training data")
    train.add_argument("--batch-size", type=int, help="examples per update, over all devices")
    train.add_argument("--seed", type=int, help="seed of all random numbers")
    train.add_argument("--out", type=Path, metavar="DIR", help="directory of the run; must be new")
    train.add_argument("--devices", type=int, metavar="N", help="number of devices")
    train.add_argument(
        "--strategy",
        help="ddp copies the weights to every device, fsdp divides them; auto: ddp",
    )
    train.add_argument(
        "--ray",
        metavar="ADDRESS|local",
        help="train on the workers of a Ray cluster, one per device, or of one started on this "
        "machine",
    )
    train.add_argument("--precision", help="32-true or bf16-mixed")
    train.add_argument(
        "--dense-twin",
        action=argparse.BooleanOptionalAction,
        help="also train a dense network for comparison (default: only for digits)",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="DIR",
        help="continue the unfinished run in DIR (or in --out)",
    )
    add_assignments(train)
    train.add_argument("--quiet", action="store_true", help="print the result, but no progress")
    train.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Train with the given configuration and print the result."""
    # PyTorch prints stack traces of its own where another rank has ended; ours is one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from probmask.training.run_directory import RunDirectory

    resume = options.resume is not None
    out = _directory(options)
    try:
        origins, config = _configuration(options, out)
    except InputError as error:
        if not resume:
            raise
        from probmask.training.rank_meeting import cannot_resume

        raise cannot_resume(out, error) from error
    if options.download:
        download(config.data, config.data_dir, options)
    finished = resume and out is not None and RunDirectory(out).finished
    with origins.named():
        outcome = _train(config, out, options)
    if not is_first_rank():
        return
    if finished:
        print_message(f"{out}: this run had already finished; printing its result.")
    if options.json:
        print_json(
            {"directory": str(outcome.directory), "run": outcome.record, "dense": outcome.dense}
        )
    else:
        print_training(outcome.directory, outcome.record, outcome.dense)


def _train(config: "TrainConfig", out: Path | None, options: argparse.Namespace) -> "Outcome":
    """Train on this machine, or on a Ray cluster."""
    resume, reporter = options.resume is not None, _reporter(options)
    if options.ray is None:
        from probmask.training.trainer import train

        return train(config, out=out, resume=resume, make_reporter=reporter)
    from probmask.training.ray_training import train_on_ray

    return train_on_ray(config, address=options.ray, out=out, resume=resume, make_reporter=reporter)


def _directory(options: argparse.Namespace) -> Path | None:
    """Return the directory of the run, which ``--out`` or ``--resume`` gives."""
    out: Path | None = options.out
    if options.resume is True and out is None:
        raise InputError("--resume: which run? Pass its directory: --resume DIR.")
    if not isinstance(options.resume, str):
        return out
    if out is not None:
        raise InputError(
            f"--resume {options.resume} --out {out}: both name the run's directory; pass one."
        )
    return Path(options.resume)


def _configuration(options: argparse.Namespace, out: Path | None) -> "tuple[Origins, TrainConfig]":
    """Return the configuration of a new run, or of the run to resume, and where it comes from."""
    from probmask.parsing import read_toml
    from probmask.training.config import complete_config
    from probmask.training.origins import Origins
    from probmask.training.run_directory import RunDirectory

    _drop_sparsity_of_dense(options)
    overrides = [
        (key, getattr(options, flag))
        for flag, key in _FLAGS.items()
        if getattr(options, flag) is not None
    ]
    overrides += assignments(options)
    run = RunDirectory(out) if options.resume is not None and out is not None else None
    source: Path | None = options.config
    if run is not None and source is None:
        run.read_config()  # raises if there is no run
        source = run.config  # keys that are not given stay those of the run
    origins = Origins(
        None if source is None else str(source),
        frozenset(key for key, _ in overrides),
        written=as_written(options, _FLAGS),
    )
    config = complete_config(
        {} if source is None else read_toml(source), overrides, origins=origins
    )
    if not options.trust:
        _check_code_is_trusted(config, source, run, given=origins.overridden)
    return origins, config


def _check_code_is_trusted(
    config: "TrainConfig",
    source: Path | None,
    run: "RunDirectory | None",
    *,
    given: Collection[str],
) -> None:
    """Raise if a file names a network or an optimizer that would have to be imported."""
    from probmask.training.config import own_code
    from probmask.training.run_directory import untrusted_code

    if run is not None:
        run.check_trusted(config, given)
        return
    for key, name in own_code(config, given=given).items():
        raise InputError(untrusted_code(source, key, name))


def _reporter(options: argparse.Namespace) -> "MakeReporter":
    """Return a bar for a terminal, lines for other output, nothing with --json or --quiet."""
    from probmask.training.progress import Bar, Lines, Quiet

    if options.json or options.quiet or not is_first_rank():
        return Quiet
    return Bar if shows_progress(options) else Lines


def _drop_sparsity_of_dense(options: argparse.Namespace) -> None:
    """Ignore ``--sparsity`` with a message for the dense method, so that scripts can pass it."""
    if options.method == "dense" and options.sparsity:
        check_sparsity_flag(options.sparsity)
        print_message(f"--method dense prunes nothing; --sparsity {options.sparsity:g} is ignored.")
        options.sparsity = None
