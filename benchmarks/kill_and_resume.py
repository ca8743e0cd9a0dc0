"""Claim: `kill -9` at any moment, then `--resume`, ends bit by bit as if nothing had happened.

One run is left alone. Then, once per kill, the same run is started anew as `probmask train`, killed
with SIGKILL at a random moment between the making of its directory and its end, and resumed. Its
artifact and its metrics, and those of its dense twin, must equal those of the first run in every
byte. The moments are seeded; a run that ends before its moment comes does not count and is
repeated with another.

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
    """Print a line per kill; 1 if any run ended differently."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        return compare(Path(directory), options.kills, chance)


def compare(directory: Path, kills: int, chance: random.Random) -> int:
    """Kill and resume so many runs, each in a directory of its own."""
    alone = directory / "alone"
    duration = let_run(alone)
    print(f"not interrupted: {duration:.1f} s from its first file to its record", flush=True)
    print(f"{'kill':>4}  {'after':>8}  {'resumed at':<22}  identical", flush=True)
    different = 0
    for number in range(1, kills + 1):
        out = directory / f"run{number}"
        moment = kill_once(out, duration, chance)
        where = resumed_at(out)
        go_on(out)
        wrong = [str(path) for path in COMPARED if not same(out / path, alone / path)]
        different += bool(wrong)
        verdict = f"NO: {', '.join(wrong)}" if wrong else "yes"
        print(f"{number:>4}  {moment:>6.2f} s  {where:<22}  {verdict}", flush=True)
    print(f"{kills - different} of {kills} killed runs ended identical to the one left alone")
    return 1 if different else 0


def command() -> list[str]:
    """The command line, by the Python that runs this script."""
    return [sys.executable, "-m", "probmask.cli", "train"]


def start(out: Path) -> subprocess.Popen[bytes]:
    """Start the run, and return when its directory is there."""
    process = subprocess.Popen(
        [*command(), "--out", str(out), *FLAGS],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not out.exists():
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before it began")
        time.sleep(0.001)
    return process


def let_run(out: Path) -> float:
    """Train without a kill; return the seconds from the first file to the record."""
    process = start(out)
    began = time.monotonic()
    if process.wait() != 0:
        raise SystemExit(f"the run failed with {process.returncode}")
    return time.monotonic() - began


def kill_once(out: Path, duration: float, chance: random.Random) -> float:
    """Start the run and kill it before it ends; return after how many seconds."""
    while True:
        process = start(out)
        moment = chance.uniform(0, duration)
        time.sleep(moment)
        if not (out / "record.json").exists():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not (out / "record.json").exists():
                return moment
        process.wait()
        out.rename(out.with_name(f"{out.name}-ended-{moment}"))


def go_on(out: Path) -> None:
    """Resume the run; if it had not even written its configuration, give the command again."""
    begun = (out / "config.toml").exists()
    arguments = ["--resume", str(out), "--json"] if begun else ["--out", str(out), *FLAGS]
    subprocess.run([*command(), *arguments], check=True, stdout=subprocess.DEVNULL)


def resumed_at(out: Path) -> str:
    """Which of the two networks was in training, and the step of its checkpoint."""
    if not (out / "config.toml").exists():
        return "before config.toml"
    finished = (out / "dense" / "record.json").exists()
    checkpoint = (out if finished else out / "dense") / "checkpoint.safetensors"
    step = read_checkpoint(checkpoint)["step"] if checkpoint.exists() else 0
    return f"{'probmask' if finished else 'dense'}, step {step}"


def same(one: Path, other: Path) -> bool:
    """Whether both are there, with the same bytes."""
    return one.exists() and other.exists() and one.read_bytes() == other.read_bytes()


if __name__ == "__main__":
    sys.exit(main())
