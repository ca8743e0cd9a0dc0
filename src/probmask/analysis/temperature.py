"""The slope of the relaxed mask against the temperature: a figure of the paper that is computed."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import torch

from probmask.core.relaxation import relaxed_slope


def slope_curve(settings: Mapping[str, Any]) -> list[dict[str, float]]:
    """S = σ(r/τ)(1 - σ(r/τ)) / (τ s (1 - s)), r = ln(s / (1 - s)) + g, for each s and τ.

    ``settings`` are those of the experiment's [curve]: ``prob`` lists s, ``noise`` is g, and τ goes
    in ``points`` steps from the first ``temperature`` to the last.
    """
    start, end = settings["temperature"]
    temperatures = torch.linspace(start, end, settings["points"], dtype=torch.float64)
    noise = torch.tensor(settings["noise"], dtype=torch.float64)
    return [
        {
            "prob": prob,
            "temperature": round(float(temperature), 6),
            "slope": float(
                relaxed_slope(torch.tensor(prob, dtype=torch.float64), noise, temperature)
            ),
        }
        for prob in settings["prob"]
        for temperature in temperatures
    ]


def to_csv(rows: list[dict[str, float]]) -> str:
    """The curve as a table that other programs read."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
