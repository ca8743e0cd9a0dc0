"""Claim: 100,000 damaged and forged artifacts do no harm: each is refused, or loads as it should.

Each mutation of an intact file is read, loaded as a state_dict and into a model, with the memory of
the process limited. "Damage" (flipped bits, cuts, splices) must be refused or leave every bit as it
was. "Lies" have all checksums put right, so that the checks behind them are reached; they must be
refused or load. Anything but an ArtifactError is a failure and printed with its seed.

    python benchmarks/fuzz_artifact.py --mutations 100000
"""

import argparse
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from probmask import artifact
from probmask.errors import ArtifactError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from artifact.mutations import DAMAGE, FORGERIES, Mutation, sample_model


def limit_memory(mebibytes: int) -> None:
    """Leave this process so much beyond what it takes already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def content_of(path: Path) -> dict[str, bytes]:
    """All bits that the file holds, by every way there is to load it."""
    artifact.read(path)
    state = artifact.load_state(path)
    model = sample_model()
    artifact.load_into(model, path, strict=False)
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def outcome(path: Path, mutation: Mutation, before: dict[str, bytes]) -> str:
    """What loading comes to: refused, the same, another, or a failure."""
    try:
        after = content_of(path)
    except ArtifactError:
        return "refused"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    if after == before:
        return "the same"
    return "FAILED: damage not noticed" if mutation in DAMAGE else "another"


def main() -> int:
    """Print how each kind of mutation ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next")
    parser.add_argument("--memory", type=int, default=512, help="MiB beyond PyTorch itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {m.__name__: Counter() for m in (*DAMAGE, *FORGERIES)}
    failures, slowest, started = 0, 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "intact"
        artifact.save(sample_model(), path, metadata={"accuracy": 0.9}, values="fp16")
        intact, before = path.read_bytes(), content_of(path)
        limit_memory(options.memory)
        for seed in range(options.seed, options.seed + options.mutations):
            rng = random.Random(seed)
            mutation = rng.choice([*DAMAGE, *FORGERIES])
            path.unlink()  # a new file: rewriting the old one would wait for the disk
            path.write_bytes(mutation(intact, rng))
            begun = time.perf_counter()
            end = outcome(path, mutation, before)
            slowest = max(slowest, time.perf_counter() - begun)
            if end.startswith("FAILED"):
                failures += 1
                print(f"seed {seed}, {mutation.__name__}: {end:.300}")
            counts[mutation.__name__][end.partition(":")[0]] += 1
    columns = ["refused", "the same", "another", "FAILED"]
    print("\n| mutation | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, counter in {**counts, "all": sum(counts.values(), Counter())}.items():
        print(f"| {name} | " + " | ".join(f"{counter[column]:,}" for column in columns) + " |")
    seconds = time.perf_counter() - started
    print(f"\n{options.mutations} mutations, {failures} failures, in {seconds:.0f} s,")
    print(f"the slowest in {1e3 * slowest:.0f} ms, with {options.memory} MiB beyond PyTorch itself")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
