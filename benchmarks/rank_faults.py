"""Claim: no fault of one rank loses anything, and a rank that does not respond is named.

Trains a small network on two ranks under `torchrun`, and lets one of them fail:

- killed: SIGKILL at random moments. `torchrun --max-restarts` starts the ranks again. The artifact
  and the metrics must equal those of an undisturbed run in every byte.
- stopped: SIGSTOP. The other rank ends after `timeout_seconds` and names it.
- full disk: the directory of the run is on a tmpfs that is too small. The run ends with one line.
  With more space it is resumed, and must equal the undisturbed run.
- cut: the ranks run in two network namespaces, and the connection between them is taken down. Both
  end after `timeout_seconds`.
- other data: one rank has other training examples. The run ends before anything is created.

A fault that cannot be produced here (no root, no `ip netns`) is skipped with the reason.

    python benchmarks/rank_faults.py --kills 20 --strategy ddp
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SETTINGS = {
    "epochs": 40,
    "batch_size": 64,
    "accelerator": "cpu",
    "checkpoint_seconds": 0.1,
    "dense_twin": "false",
    "tensorboard": "false",
    "threads": 1,
    "model_args.width": 8,
    "method.sparsity": 0.9,
    "timeout_seconds": 10,
}
COMPARED = ("model.safetensors", "metrics.jsonl")
KILLS_PER_RUN = 5
LONGEST = 900  # seconds of a run
HOSTS = ("probmask-a", "probmask-b")


class Unavailable(Exception):  # noqa: N818 - a reason, not a failure
    """This machine cannot produce the fault."""


class Run:
    """A training under `torchrun`."""

    def __init__(
        self,
        out: Path,
        strategy: str,
        *,
        launch: Sequence[str] = ("--standalone", "--nproc_per_node=2"),
        prefix: Sequence[str] = (),
        interface: str = "lo",
        arguments: Sequence[str] = (),
    ) -> None:
        self.out = out
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", *launch]
        command += ["-m", "probmask.cli", "train", "--quiet", "--strategy", strategy]
        command += arguments or ["--out", str(out)]
        for key, value in SETTINGS.items():
            command += ["--set", f"{key}={value}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ranks(self) -> list[int]:
        """Return the process of each rank that is running."""
        found = {}
        parent = self.process.pid
        try:
            for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
                words = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
                rank = next((word[5:] for word in words if word.startswith(b"RANK=")), None)
                if rank is not None:
                    found[int(rank)] = int(number)
        except OSError:  # a process has just ended
            return []
        return [found[rank] for rank in sorted(found)]

    def wait_for_progress(self) -> None:
        """Wait until a checkpoint is written that did not exist before."""
        path = self.out / "checkpoint.safetensors"
        before = path.stat().st_mtime_ns if path.exists() else 0
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and self.process.poll() is None:
            if path.exists() and path.stat().st_mtime_ns != before and len(self.ranks()) > 0:
                return
            time.sleep(0.05)
        raise RuntimeError(f"no progress:\n{self.finish()[1]}")

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was printed."""
        try:
            code = self.process.wait(LONGEST)
        except subprocess.TimeoutExpired:
            code = -1
        self.end()
        self._log.seek(0)
        return code, self._log.read()

    def end(self) -> None:
        """Kill what is left, also what is stopped."""
        for process in self.ranks():
            os.kill(process, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def killed(directory: Path, reference: Path, options: argparse.Namespace) -> str:
    """Kill random ranks at random moments; compare every run with the undisturbed one."""
    rng = random.Random(options.seed)
    done = equal = runs = 0
    while done < options.kills:
        planned = min(KILLS_PER_RUN, options.kills - done)
        launch = ["--standalone", "--nproc_per_node=2", f"--max-restarts={planned}"]
        run = Run(directory / f"killed{runs}", options.strategy, launch=launch)
        for _ in range(planned):
            run.wait_for_progress()
            time.sleep(rng.uniform(0, 0.5))
            if not (ranks := run.ranks()) or (run.out / "record.json").exists():
                break
            os.kill(rng.choice(ranks), signal.SIGKILL)
            done += 1
            print(f"  kill {done}", flush=True)
            while len(run.ranks()) == len(ranks) and run.process.poll() is None:
                time.sleep(0.05)
        code, printed = run.finish()
        runs += 1
        if code != 0:
            raise RuntimeError(printed)
        equal += same(run.out, reference)
    return f"{done} kills in {runs} runs; {equal} of {runs} equal the undisturbed run"


def stopped(directory: Path, reference: Path, options: argparse.Namespace) -> str:  # noqa: ARG001
    """Stop each rank once."""
    texts = []
    for rank in (1, 0):
        run = Run(directory / f"stopped{rank}", options.strategy)
        run.wait_for_progress()
        victim = run.ranks()[rank]
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        other = next(pid for pid in run.ranks() if pid != victim)
        while Path(f"/proc/{other}").exists() and time.monotonic() - began < LONGEST:
            time.sleep(0.1)
        seconds = time.monotonic() - began
        os.kill(victim, signal.SIGKILL)  # torchrun would wait for it
        texts.append(f"rank {rank}: {seconds:.0f} s, {message(run.finish()[1])!r}")
    return "; ".join(texts)


def full_disk(directory: Path, reference: Path, options: argparse.Namespace) -> str:
    """Train on a tmpfs that is too small for the run, then resume with more space."""
    mount = directory / "small"
    mount.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(mount))
    try:
        code, printed = Run(mount / "run", options.strategy).finish()
        call("mount", "-o", "remount,size=100m", str(mount))
        resumed = Run(mount / "run", options.strategy, arguments=["--resume", str(mount / "run")])
        if resumed.finish()[0] != 0:
            raise RuntimeError("cannot be resumed")
        result = "equals" if same(mount / "run", reference) else "DIFFERS FROM"
    finally:
        call("umount", str(mount))
    return f"exit code {code}, {message(printed)!r}; resumed, it {result} the undisturbed run"


def cut(directory: Path, reference: Path, options: argparse.Namespace) -> str:  # noqa: ARG001
    """Take down the connection between two network namespaces."""
    if shutil.which("ip") is None:
        raise Unavailable("there is no command ip (package iproute2)")
    out = directory / "cut"
    try:
        for host in HOSTS:
            call("ip", "netns", "add", host)
        names = ("ip", "link", "add", "veth0", "netns", HOSTS[0], "type", "veth")
        call(*names, "peer", "name", "veth0", "netns", HOSTS[1])
        for number, host in enumerate(HOSTS, 1):
            inside = ("ip", "-n", host)
            call(*inside, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                call(*inside, "link", "set", device, "up")
        runs = [
            Run(
                out,
                options.strategy,
                prefix=["ip", "netns", "exec", host],
                launch=[
                    "--nnodes=2",
                    "--nproc_per_node=1",
                    f"--node_rank={number}",
                    "--master_addr=10.77.0.1",
                    "--master_port=29511",
                ],
                interface="veth0",
            )
            for number, host in enumerate(HOSTS)
        ]
        runs[0].wait_for_progress()
        call("ip", "-n", HOSTS[0], "link", "set", "veth0", "down")
        began = time.monotonic()
        ended = {}
        while len(ended) < 2 and time.monotonic() - began < LONGEST:
            for number, run in enumerate(runs):
                if number not in ended and not run.ranks():
                    ended[number] = time.monotonic() - began
            time.sleep(0.1)
        for run in runs:
            run.end()
        return "; ".join(
            f"host {number} ends after {ended[number]:.0f} s, {message(run.finish()[1])!r}"
            for number, run in enumerate(runs)
        )
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def other_data(directory: Path, reference: Path, options: argparse.Namespace) -> str:  # noqa: ARG001
    """Hold out validation examples on rank 1 only."""
    out = directory / "data"
    script = directory / "other_data.py"
    script.write_text(
        "import os, sys\nfrom probmask.cli import main\n"
        "extra = ['--select-on', 'none'] if os.environ['RANK'] == '1' else []\n"
        "main([*sys.argv[1:], *extra])\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    given = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, *launch, "train", "--out", str(out), "--quiet", *given],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST,
    )
    created = "was created" if out.exists() else "nothing was created"
    return f"{message(done.stderr)!r}; {created}"


def call(*command: str) -> None:
    """Run a system command; raise `Unavailable` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:3])}: {done.stderr.strip()}")


def message(printed: str) -> str:
    """Return the lines that probmask has printed."""
    found: Iterator[str] = (
        line for line in printed.splitlines() if re.match(r"probmask( \(rank \d+\))?: ", line)
    )
    return " | ".join(found)


def same(run: Path, reference: Path) -> bool:
    """Return whether artifact and metrics are the same bytes."""
    return all((run / name).read_bytes() == (reference / name).read_bytes() for name in COMPARED)


FAULTS: dict[str, Callable[[Path, Path, argparse.Namespace], str]] = {
    "stopped": stopped,
    "full-disk": full_disk,
    "cut": cut,
    "other-data": other_data,
    "killed": killed,
}


def main() -> None:
    """Print a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], help="default: all")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        reference = directory / "reference"
        code, printed = Run(reference, options.strategy).finish()
        if code:
            raise RuntimeError(printed)
        for name in options.faults or FAULTS:
            try:
                print(f"{name}: {FAULTS[name](directory, reference, options)}", flush=True)
            except Unavailable as reason:
                print(f"{name}: skipped, {reason}", flush=True)


if __name__ == "__main__":
    main()
