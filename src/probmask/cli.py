"""The command line. Imports wait until a command needs them, so that help comes at once."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from probmask.commands import (
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
from probmask.commands.output import say
from probmask.errors import (
    AbsentClassWarning,
    InputError,
    LayerCollapseWarning,
    NonFiniteError,
    UnreadableImageWarning,
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
# What extras install, by the names it is imported under.
_EXTRAS = {
    **dict.fromkeys(
        ("PIL", "lightning_fabric", "rich", "sklearn", "tensorboard", "tomli_w"), "train"
    ),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    "ray": "ray",
    **dict.fromkeys(("llvmlite", "numba"), "runtime"),
}
# Warnings that are meant for people; others are for those who write programs.
_SHOWN = (AbsentClassWarning, LayerCollapseWarning, UnreadableImageWarning)


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
        extra = _EXTRAS[error.name]
        say(f"{error.name} is not installed; pip install 'probmask[{extra}]'.")
        return 2
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, NonFiniteError) as error:  # a NaN is of our own making, not of the input
        say(str(error), every_rank=True)
        return 1
    except InputError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt as error:
        what = str(error) or "--resume DIR goes on from the checkpoint"
        print(f"probmask: interrupted; {what}", file=sys.stderr)
        return 130
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
        command.add_argument("--json", action="store_true", help="print JSON, for machines")
    return parser


def _show_warnings_in_one_line() -> None:
    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, _SHOWN):
            every_rank = issubclass(category, UnreadableImageWarning)
            say(f"warning: {message}", every_rank=every_rank)

    warnings.showwarning = show


if __name__ == "__main__":
    sys.exit(main())
