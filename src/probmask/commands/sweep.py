"""`probmask sweep`: train a grid of runs."""

import argparse
from pathlib import Path
from typing import Any

from probmask.commands.sweep_flags import (
    add_sweep_flags,
    carry_out,
    overrides_of,
    print_plan,
    refuse_failures,
)


def add(commands: Any) -> None:
    """Add the command and its flags."""
    sweep = commands.add_parser(
        "sweep",
        help="train a grid of runs side by side",
        description="Train every run of a grid that is not finished yet: methods, sparsities, "
        "seeds, or any other keys, in parallel processes. The same command goes on after an end "
        "of any kind.",
    )
    sweep.add_argument("grid", type=Path, metavar="FILE.toml", help="[run] and [grid]")
    add_sweep_flags(sweep)
    sweep.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Train what is left of the grid; print what has become of all of it."""
    from probmask.sweeps.grid import load_grid

    planned = load_grid(options.grid, overrides_of(options))
    out = options.out or Path("runs") / options.grid.stem
    plan = carry_out(planned, out, options)
    print_plan(plan, out, options)
    refuse_failures(plan, out)
