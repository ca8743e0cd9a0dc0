"""Claim: 100,000 damaged and forged artifacts do no harm: each raises an error or loads correctly.

Each mutation of an intact file is read, loaded as a state_dict and loaded into a model, in a
process with limited memory. Damage (flipped bits, cuts, splices) must raise an ArtifactError or
change no tensor. Forgeries have correct checksums, so that the later checks of the reader run; they
must raise an ArtifactError or load. Any other exception is a failure and is printed with its seed.

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
    """Limit this process to `mebibytes` beyond its current size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def loaded_bytes(path: Path) -> dict[str, bytes]:
    """Load the file in every way and return the bytes of each tensor."""
    artifact.read(path)
    state = artifact.load_state(path)
    model = sample_model()
    artifact.load_into(model, path, strict=False)
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def outcome(path: Path, mutation: Mutation, before: dict[str, bytes]) -> str:
    """Load the file and return the result: refused, the same, another, or a failure."""
    try:
        after = loaded_bytes(path)
    except ArtifactError:
        return "refused"
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    if after == before:
        return "the same"
    return "FAILED: damage not detected" if mutation in DAMAGE else "another"


def main() -> int:
    """Print the number of results for each kind of mutation. Return 1 on any failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the first mutation; it increases by one for each",
    )
    parser.add_argument(
        "--memory", type=int, default=512, help="limit in MiB beyond PyTorch itself"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts: dict[str, Counter[str]] = {m.__name__: Counter() for m in (*DAMAGE, *FORGERIES)}
    failures, slowest, started = 0, 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "intact"
        artifact.save(sample_model(), path, metadata={"accuracy": 0.9}, values="fp16")
        intact, before = path.read_bytes(), loaded_bytes(path)
        limit_memory(options.memory)
        for seed in range(options.seed, options.seed + options.mutations):
            rng = random.Random(seed)
            mutation = rng.choice([*DAMAGE, *FORGERIES])
            path.unlink()  # a new file, because rewriting the old one would wait for the disk
            path.write_bytes(mutation(intact, rng))
            loading = time.perf_counter()
            result = outcome(path, mutation, before)
            slowest = max(slowest, time.perf_counter() - loading)
            if result.startswith("FAILED"):
                failures += 1
                print(f"seed {seed}, {mutation.__name__}: {result:.300}")
            counts[mutation.__name__][result.partition(":")[0]] += 1
    columns = ["refused", "the same", "another", "FAILED"]
    print("\n| mutation | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for name, counter in {**counts, "all": sum(counts.values(), Counter())}.items():
        print(f"| {name} | " + " | ".join(f"{counter[column]:,}" for column in columns) + " |")
    seconds = time.perf_counter() - started
    print(f"\n{options.mutations} mutations, {failures} failures, in {seconds:.0f} s;")
    print(
        f"slowest: {1e3 * slowest:.0f} ms; memory limit: {options.memory} MiB beyond PyTorch itself"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
