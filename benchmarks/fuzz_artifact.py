"""Claim: 100,000 damaged and forged artifacts do no harm: each raises an error or loads correctly.

There are two intact files: one with fp16 values and one with integers. Each mutation is read,
loaded as a state_dict and loaded into a model, in a process with limited memory. Damage (flipped
bits, cuts, splices) must raise an ArtifactError or change no tensor. Forgeries have correct
checksums, so that the later checks of the reader run; they must raise an ArtifactError or load. Any
other exception is a failure and is printed with its seed.

    python benchmarks/fuzz_artifact.py --mutations 100000
"""

import random
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from fuzzing import Mutation, fuzz, parse_options
from probmask import artifact

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from artifact.mutations import DAMAGE, FORGERIES, sample_model


def loaded_bytes(path: Path) -> dict[str, bytes]:
    """Load the file in every way and return the bytes of each tensor."""
    artifact.read(path)
    state = artifact.load_state(path)
    model = sample_model()
    artifact.load_into(model, path, strict=False)
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def attempt(
    mutation: Mutation, path: Path, intact: bytes, before: dict[str, bytes], rng: random.Random
) -> str:
    """Mutate the intact file, load it, and compare its tensors with those from before."""
    path.unlink()  # a new file, because rewriting the old one would wait for the disk
    path.write_bytes(mutation(intact, rng))
    if loaded_bytes(path) == before:
        return "the same"
    assert mutation not in DAMAGE, "damage not detected"
    return "another"


def main() -> int:
    """Print the number of results for each kind of mutation. Return 1 on any failure."""
    options = parse_options(__doc__, mutations=100_000)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "intact"
        kinds = {}
        for values in ("fp16", "int8"):
            artifact.save(
                sample_model(), path, metadata={"accuracy": 0.9}, values=values, overwrite=True
            )
            intact, before = path.read_bytes(), loaded_bytes(path)
            kinds |= {
                f"{mutation.__name__}, {values}": partial(attempt, mutation, path, intact, before)
                for mutation in (*DAMAGE, *FORGERIES)
            }
        return fuzz(kinds, options)


if __name__ == "__main__":
    sys.exit(main())
