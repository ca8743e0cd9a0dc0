"""Claim: a run that is killed by `kill -9` at any time and resumed gives bit-identical results.

The first run is not interrupted. Then, once per kill, the same run is started again as `probmask
train`, killed with SIGKILL at a random time between the creation of its directory and its end, and
resumed. Its artifact and its metrics, and those of its dense twin, must equal those of the first
run in every byte. The times are seeded. A run that ends before it is killed does not count and is
repeated with another time.

    python benchmarks/kill_and_resume.py --kills 20
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from probmask.training.checkpoint import read_checkpoint

FLAGS = ["--epochs", "10", "--dense-twin", "--json"]
FLAGS += ["--set", "model_args.width=8", "--set", "checkpoint_seconds=0.1", "--set", "threads=1"]
COMPARED = [
    Path(part, name) for part in (".", "dense") for name in ("model.safetensors", "metrics.jsonl")
]


def main() -> int:
    """Print a line for each kill. Return 1 if any result differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill times")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        return compare(Path(directory), options.kills, rng)


def compare(directory: Path, kills: int, rng: random.Random) -> int:
    """Kill and resume `kills` runs, each in its own directory. Return 1 if any result differs."""
    reference = directory / "reference"
    duration = run_uninterrupted(reference)
    print(f"uninterrupted run: {duration:.1f} s from its first file to its record", flush=True)
    print(f"{'kill':>4}  {'after':>8}  {'resumed at':<22}  identical", flush=True)
    different = 0
    for number in range(1, kills + 1):
        out = directory / f"run{number}"
        killed_after = kill_once(out, duration, rng)
        where = resumed_at(out)
        resume(out)
        wrong = [str(path) for path in COMPARED if not same(out / path, reference / path)]
        different += bool(wrong)
        verdict = f"NO: {', '.join(wrong)}" if wrong else "yes"
        print(f"{number:>4}  {killed_after:>6.2f} s  {where:<22}  {verdict}", flush=True)
    print(f"{kills - different} of {kills} killed runs are identical to the uninterrupted one")
    return 1 if different else 0


def command() -> list[str]:
    """Return the command line, with the Python that runs this script."""
    return [sys.executable, "-m", "probmask.cli", "train"]


def start(out: Path) -> subprocess.Popen[bytes]:
    """Start the run and wait until its directory exists."""
    process = subprocess.Popen(
        [*command(), "--out", str(out), *FLAGS],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not out.exists():
        if process.poll() is not None:
            raise SystemExit(
                f"the run ended with exit code {process.returncode} before it created its directory"
            )
        time.sleep(0.001)
    return process


def run_uninterrupted(out: Path) -> float:
    """Train without a kill. Return the seconds from the first file to the record."""
    process = start(out)
    started = time.monotonic()
    if process.wait() != 0:
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    return time.monotonic() - started


def kill_once(out: Path, duration: float, rng: random.Random) -> float:
    """Start the run and kill it before it ends. Return the seconds until the kill."""
    while True:
        process = start(out)
        delay = rng.uniform(0, duration)
        time.sleep(delay)
        if not (out / "record.json").exists():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not (out / "record.json").exists():
                return delay
        process.wait()
        out.rename(out.with_name(f"{out.name}-ended-{delay}"))


def resume(out: Path) -> None:
    """Resume the run. If it had not written its configuration yet, start it again."""
    configured = (out / "config.toml").exists()
    arguments = ["--resume", str(out), "--json"] if configured else ["--out", str(out), *FLAGS]
    subprocess.run([*command(), *arguments], check=True, stdout=subprocess.DEVNULL)


def resumed_at(out: Path) -> str:
    """Return which of the two networks was being trained, and the step of its checkpoint."""
    if not (out / "config.toml").exists():
        return "before config.toml"
    finished = (out / "dense" / "record.json").exists()
    checkpoint = (out if finished else out / "dense") / "checkpoint.safetensors"
    step = read_checkpoint(checkpoint)["step"] if checkpoint.exists() else 0
    return f"{'probmask' if finished else 'dense'}, step {step}"


def same(one: Path, other: Path) -> bool:
    """Return whether both files exist and have the same bytes."""
    return one.exists() and other.exists() and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
