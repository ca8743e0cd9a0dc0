"""Print the slope S of the relaxed mask for one noise, and its mean and RMS over the noise.

    python benchmarks/slope_moments.py

S = dm/ds scales the gradient of a probability s. The paper's Figure 8 shows it for the noise
g = 0.04. Training draws g anew at every update. Adam divides the mean gradient by its RMS, so the
steps of a probability follow mean/RMS of S, not S.
"""

import argparse
from collections.abc import Sequence

import torch

from probmask.core.relaxation import relaxed_slope

_PROBS = (0.1, 0.5, 0.99)
_TEMPERATURES = (1.0, 0.7, 0.42, 0.3, 0.1, 0.03)
_NOISE = 0.04  # the paper's
_QUANTILES = 200_000


def slopes(prob: float, temperature: float, noise: torch.Tensor) -> torch.Tensor:
    """Return S for each value of the noise."""
    return relaxed_slope(
        torch.tensor(prob, dtype=torch.float64),
        noise,
        torch.tensor(temperature, dtype=torch.float64),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown, a row per probability and temperature."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    uniform = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    noise = uniform.log() - torch.log1p(-uniform)
    print("| probability | temperature | S at g = 0.04 | mean of S | RMS of S | mean/RMS |")
    print("|---:|---:|---:|---:|---:|---:|")
    for prob in _PROBS:
        for temperature in _TEMPERATURES:
            shown = float(slopes(prob, temperature, torch.tensor(_NOISE, dtype=torch.float64)))
            found = slopes(prob, temperature, noise)
            mean, rms = float(found.mean()), float(found.square().mean().sqrt())
            print(
                f"| {prob:g} | {temperature:g} | {shown:.2f} | {mean:.2f} | {rms:.2f} "
                f"| {mean / rms:.2f} |"
            )


if __name__ == "__main__":
    main()
