"""`probmask reproduce`: reproduce a table or figure of the paper."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probmask.cli.compare import print_comparison
from probmask.cli.sweep import (
    add_sweep_arguments,
    execute_sweep,
    print_plan,
    raise_if_failed,
    sweep_overrides,
)
from probmask.cli.terminal import print_json, print_rows, print_text
from probmask.errors import InputError

if TYPE_CHECKING:
    from probmask.analysis.experiments import Experiment
    from probmask.sweeps.sweep_directory import Plan


def add(commands: Any) -> None:
    """Add the command and its arguments to the parser."""
    reproduce = commands.add_parser(
        "reproduce",
        help="reproduce a table or figure of the paper",
        description="Train the unfinished runs of a table or figure of the paper. Scale 'paper' "
        "uses the paper's settings and needs GPUs; scale 'laptop' uses small networks on a subset "
        "of CIFAR-10 and takes minutes per run on one core.",
    )
    reproduce.add_argument(
        "experiment", nargs="?", metavar="NAME", help="see 'probmask reproduce --list'"
    )
    reproduce.add_argument(
        "--scale", metavar="laptop|paper", default="laptop", help="default: %(default)s"
    )
    reproduce.add_argument("--list", action="store_true", help="list the experiments")
    reproduce.add_argument("--markdown", action="store_true", help="print the list as Markdown")
    add_sweep_arguments(reproduce)
    reproduce.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """List the experiments, or train the runs of one and print its table."""
    from probmask.analysis.experiments import find_experiment

    if options.list:
        _list(options)
        return
    if options.experiment is None:
        raise InputError("reproduce: pass the name of an experiment; --list prints the names.")
    experiment = find_experiment(options.experiment)
    if experiment.curve is not None:
        _compute_curve(experiment, options)
    else:
        _train(experiment, options)


def _train(experiment: "Experiment", options: argparse.Namespace) -> None:
    from probmask.sweeps.grid import expand

    source = f"reproduce {experiment.name} --scale {options.scale}"
    planned = expand(experiment.sweep(options.scale), sweep_overrides(options), source=source)
    out = options.out or Path("runs") / f"{experiment.name}-{options.scale}"
    plan = execute_sweep(planned, out, options)
    if options.dry_run or options.json or not plan.finished:
        print_plan(plan, out, options)
    else:
        _print_results(experiment, plan, out)
    raise_if_failed(plan, out)


def _print_results(experiment: "Experiment", plan: "Plan", out: Path) -> None:
    """Print the table of the finished runs and write the page that shows them."""
    from probmask.analysis.comparison import compare
    from probmask.report import write_page

    runs = [run for _, run in plan.finished]
    _print_title(experiment)
    print_comparison(compare(runs), "text")
    for planned, reason in plan.failed:
        print_text(f"{planned.name}: {reason}")
    page = out / "report.html"
    write_page(runs, page)
    print_text(f"{page} shows {experiment.shows}; records to commit are in {out / 'records'}")


def _compute_curve(experiment: "Experiment", options: argparse.Namespace) -> None:
    """Compute a figure that needs no training, print some of its points and write all as CSV."""
    from probmask.analysis.experiments import curve_csv, slope_curve
    from probmask.files import write_atomically

    assert experiment.curve is not None
    rows = slope_curve(experiment.curve)
    if options.json:
        print_json({"experiment": experiment.name, "points": rows})
        return
    path = None if options.dry_run else (options.out or Path("runs")) / f"{experiment.name}.csv"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, curve_csv(rows).encode(), overwrite=True)
    temperatures = sorted({row["temperature"] for row in rows}, reverse=True)
    shown = [*temperatures[:: len(temperatures) // 10], temperatures[-1]]
    probs = list(dict.fromkeys(row["prob"] for row in rows))
    slopes = {(row["prob"], row["temperature"]): row["slope"] for row in rows}
    table = [
        (f"{at:.3f}", *(f"{slopes[prob, at]:.4g}" for prob in probs)) for at in dict.fromkeys(shown)
    ]
    _print_title(experiment)
    print_rows(("temperature", *(f"S at s = {prob:g}" for prob in probs)), table)
    if path is not None:
        print_text(f"all points: {path}")


def _print_title(experiment: "Experiment") -> None:
    print_text(experiment.title)
    print_text(experiment.about)
    print_text()


def _list(options: argparse.Namespace) -> None:
    from probmask.analysis.experiments import SCALES, experiments

    described: list[dict[str, Any]] = [
        {
            "name": each.name,
            "title": each.title,
            "about": each.about,
            "scales": {scale: _extent(each, scale) for scale in SCALES if scale in each.scales},
        }
        for each in experiments().values()
    ]
    if options.json:
        print_json(described)
        return
    rows = [
        (row["name"], row["title"], *(_extent_text(row["scales"], scale) for scale in SCALES))
        for row in described
    ]
    print_rows(("name", "what it is", *SCALES), rows, markdown=options.markdown)


def _extent(experiment: "Experiment", scale: str) -> dict[str, Any]:
    """Return the number of runs, their total time and the hardware it is estimated for."""
    from probmask.sweeps.grid import expand

    runs = len(expand(experiment.sweep(scale), source=experiment.name))
    hours = runs * experiment.minutes(scale) / 60
    return {"runs": runs, "hours": round(hours, 2), "on": experiment.hardware(scale)}


def _extent_text(scales: dict[str, Any], scale: str) -> str:
    if not scales:
        return "computed in seconds"
    if scale not in scales:
        return "–"
    from probmask.sweeps.sweep_progress import format_duration

    extent = scales[scale]
    runs = f"{extent['runs']} run{'s' if extent['runs'] > 1 else ''}"
    return f"{runs}, about {format_duration(3600 * extent['hours'])} on {extent['on']}"
