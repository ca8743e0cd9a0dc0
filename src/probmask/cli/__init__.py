"""The command line, one module per command. Heavy imports wait until a command runs."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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
    KernelCacheWarning,
    LayerCollapseWarning,
    NonFiniteError,
    RankLostError,
    RankMismatchError,
    RestartWarning,
    TensorBoardWarning,
    UnmaskedWeightsWarning,
    UnreadableImageWarning,
    VersionWarning,
    WorkerError,
)
from probmask.messages import closest, suggestion
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
    WorkerError: 1,
    OSError: 1,
    RankLostError: 1,
    RankMismatchError: 1,
}
_EXAMPLES = """\
examples:
  probmask train                    train on handwritten digits at 98 % sparsity
  probmask train --data cifar10 --download --model resnet20 --sparsity 0.95 --out runs/mine
  probmask watch runs/mine          show its curves
  probmask bench runs/mine          time the finished network on this machine

'probmask COMMAND --help' describes a command.
"""
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
    KernelCacheWarning,
    LayerCollapseWarning,
    RestartWarning,
    TensorBoardWarning,
    UnmaskedWeightsWarning,
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
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    if not given:
        parser.print_help()
        return 0
    options, unknown = parser.parse_known_args(given)
    if unknown:
        options.parser.reject(unknown[0])
    code = _run(options)
    if _is_one_of_several_ranks():
        # Skip the interpreter's shutdown: a thread of Gloo that frees a tensor then aborts the
        # process, and a rank that has failed would wait there for the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _is_one_of_several_ranks() -> bool:
    library = sys.modules.get("torch.distributed")
    return library is not None and library.is_initialized() and library.get_world_size() > 1


def _run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code; print its errors."""
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
        directory = getattr(options, "out", None) or getattr(options, "resume", None)
        where = directory if isinstance(directory, str | Path) else "DIR"
        hint = str(error) or f"--resume {where} continues from the checkpoint"
        print_message(f"interrupted; {hint}")
        return _INTERRUPTED
    except tuple(_EXIT_CODES) as error:
        code = next(code for kind, code in _EXIT_CODES.items() if isinstance(error, kind))
        # Wrong input is the same on all ranks of a machine, but a single rank can fail.
        if not isinstance(error, RankLostError) or error.first:
            on_this_machine = os.environ.get("LOCAL_RANK") == "0"
            print_message(_text(error), every_rank=code == 1 or on_this_machine)
        return code
    return 0


def _text(error: Exception) -> str:
    """Return the message of an error, without the number of a system error."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    return str(error)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and suggest the command or option that was meant."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with code 2."""
        join = " See" if message.endswith("?") else "; see"
        print_message(f"{message}{join} '{self.prog} --help'.")
        raise SystemExit(2)

    def reject(self, argument: str) -> NoReturn:
        """Report an unknown argument, suggest the closest option, and exit with code 2."""
        name = argument.partition("=")[0]
        close = closest(name, self._option_string_actions) if name.startswith("-") else None
        hint = "" if close is None else f"; did you mean {close!r}?"
        self.error(f"{name}: '{self.prog}' has no such argument{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest a close choice; argparse calls this for every argument that has choices."""
        if action.choices is not None and value not in action.choices:
            flag = "".join(f"{option} " for option in action.option_strings[:1])
            kind = "command" if action.metavar == "COMMAND" else "choice"
            hint = suggestion(str(value), map(str, action.choices)).rstrip(".")
            self.error(f"{flag}{value}: no such {kind}; {hint}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="probmask",
        description="Train neural networks to an exact sparsity, and use them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"probmask {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.set_defaults(parser=command)
    return parser


def _show_warnings_in_one_line() -> None:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, _SHOWN_WARNINGS):
            every_rank = issubclass(category, UnreadableImageWarning)
            print_message(f"warning: {message}", every_rank=every_rank)

    warnings.showwarning = show
