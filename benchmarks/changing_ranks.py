"""Claim: a run that changes its number of ranks has the loss of an undisturbed one, to percents.

Training magnifies the rounding of sums. With DDP, `probmask-tied` also bounds gradients by the RMS
over a rank's part of the batch.

A network without BatchNorm is trained once on one rank without interruption, and once on 1, 2, 4
and 1 ranks: whenever a quarter of the epochs is done, all ranks are killed, and the run is resumed
on another number of them. The plot has the loss of both per epoch, and their relative difference.

    python benchmarks/changing_ranks.py --plot docs/images/changing_ranks.png
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt

from line_plot import INK

RANKS = ((1, "auto"), (2, "fsdp"), (4, "ddp"), (1, "auto"))
EPOCHS = 12
SETTINGS = ["model=conv4", "model_args.width=16", f"epochs={EPOCHS}", "batch_size=64"]
SETTINGS += [
    "method.sparsity=0.5",
    "optimizer.lr=0.02",
    "accelerator=cpu",
    "threads=1",
    "select_on=none",
]
SETTINGS += ["dense_twin=false", "tensorboard=false", "checkpoint_seconds=0.1"]
COLORS = ("#b4bbc7", "#d1495b")


def start(arguments: list[str], ranks: int, strategy: str) -> subprocess.Popen[bytes]:
    """Start `probmask train` on some ranks of this machine."""
    command = [sys.executable, "-m", "probmask.cli", "train", "--quiet", *arguments]
    return subprocess.Popen(
        [*command, "--devices", str(ranks), "--strategy", strategy],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def losses(run: Path) -> list[float]:
    """Return the loss of every epoch so far."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def train_still(out: Path) -> None:
    """Train on one rank without interruption."""
    given = [part for setting in SETTINGS for part in ("--set", setting)]
    if start(["--out", str(out), *given], *RANKS[0]).wait() != 0:
        raise RuntimeError("the undisturbed run failed")


def train_changing(out: Path) -> None:
    """Train on changing numbers of ranks; all of them are killed before a change."""
    given = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ["--out", str(out), *given]
    for part, (ranks, strategy) in enumerate(RANKS, 1):
        process = start(arguments, ranks, strategy)
        while part < len(RANKS) and len(losses(out)) < EPOCHS * part // len(RANKS):
            if process.poll() is not None:
                raise RuntimeError(f"the run on {ranks} ranks failed")
            time.sleep(0.02)
        if part < len(RANKS):
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() != 0 and part == len(RANKS):
            raise RuntimeError("the last part failed")
        print(f"{ranks} ranks ({strategy}): {len(losses(out))} epochs", flush=True)
        arguments = ["--resume", str(out)]


def draw(still: list[float], changing: list[float], path: Path) -> None:
    """Draw both losses, and the relative difference below them."""
    figure, (above, below) = plt.subplots(
        2, figsize=(6, 4), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    epochs = range(1, len(still) + 1)
    above.plot(epochs, still, color=COLORS[0], linewidth=4, label="one rank, undisturbed")
    above.plot(epochs, changing, color=COLORS[1], linewidth=1.5, label="1, 2, 4 and 1 ranks")
    above.set_ylabel("training loss")
    above.legend(frameon=False)
    differences = [abs(a - b) / a for a, b in zip(still, changing, strict=True)]
    below.semilogy(epochs, [max(each, 1e-9) for each in differences], "o-", color=INK, markersize=3)
    below.set_ylabel("relative\ndifference")
    below.set_xlabel("epoch")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        for part in range(1, len(RANKS)):
            axes.axvline(EPOCHS * part / len(RANKS) + 0.5, color="#e6e9ef", zorder=0)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train both runs, print the largest difference, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, help="file of the plot")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        still, changing = Path(temporary, "still"), Path(temporary, "changing")
        train_still(still)
        train_changing(changing)
        pairs = list(zip(losses(still), losses(changing), strict=True))
        most = max(abs(a - b) / a for a, b in pairs)
        print(f"largest relative difference of the loss of an epoch: {most:.2g}")
        kept = [json.loads((run / "record.json").read_text())["kept"] for run in (still, changing)]
        print(f"weights kept: {kept[0]} and {kept[1]}")
        if options.plot is not None:
            draw(losses(still), losses(changing), options.plot)


if __name__ == "__main__":
    main()
