"""The command line, one module per command. Heavy imports wait until a command runs."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from probmask.cli import (
    bench,
    compare,
    evaluate,
    export,
    inspect,
    listing,
    plan,
    report,
    reproduce,
    sweep,
    train,
    watch,
)
from probmask.cli.terminal import print_message
from probmask.errors import (
    AbsentClassWarning,
    DownloadError,
    FailedRunsError,
    InputError,
    LayerCollapseWarning,
    NonFiniteError,
    TensorBoardWarning,
    UnreadableImageWarning,
    VersionWarning,
)
from probmask.version import __version__

# In the order of the help.
_COMMANDS = (
    plan,
    train,
    watch,
    evaluate,
    inspect,
    bench,
    export,
    listing,
    sweep,
    reproduce,
    compare,
    report,
)
# Exit codes by exception: 2 for wrong input, 1 for failures while working.
_EXIT_CODES: dict[type[Exception], int] = {
    InputError: 2,
    NonFiniteError: 1,
    DownloadError: 1,
    FailedRunsError: 1,
    OSError: 1,
}
_INTERRUPTED = 130  # as shells report Ctrl-C
# The extra that installs each module.
_EXTRAS = {
    **dict.fromkeys(
        ("PIL", "lightning_fabric", "pooch", "rich", "sklearn", "tensorboard", "tomli_w"), "train"
    ),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "ray": "ray",
    **dict.fromkeys(("llvmlite", "numba"), "runtime"),
}
# Warnings for users; other warnings are for programmers and are not shown.
_SHOWN_WARNINGS = (
    AbsentClassWarning,
    LayerCollapseWarning,
    TensorBoardWarning,
    UnreadableImageWarning,
    VersionWarning,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Command-line arguments; those of the process by default.

    Returns:
        0 on success, 1 if the command failed while working, 2 if its input is wrong, 130 if it
        was interrupted.

    Example:
        >>> from probmask.cli import main
        >>> main(["list", "models", "--json"])  # doctest: +ELLIPSIS
        [...
        0
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        with warnings.catch_warnings():
            _show_warnings_in_one_line()
            command(options)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        extra = _EXTRAS[error.name]
        print_message(f"{error.name} is not installed; run pip install 'probmask[{extra}]'.")
        return 2
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as error:
        hint = str(error) or "--resume DIR continues from the checkpoint"
        print_message(f"interrupted; {hint}")
        return _INTERRUPTED
    except tuple(_EXIT_CODES) as error:
        code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
        # Wrong input is the same on all ranks, but a single rank can fail.
        print_message(str(error), every_rank=code == 1)
        return code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="probmask", description="Train neural networks to an exact sparsity, and use them."
    )
    parser.add_argument("--version", action="version", version=f"probmask {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _show_warnings_in_one_line() -> None:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, _SHOWN_WARNINGS):
            every_rank = issubclass(category, UnreadableImageWarning)
            print_message(f"warning: {message}", every_rank=every_rank)

    warnings.showwarning = show
