"""Claim: 100,000 damaged and forged artifacts do no harm: each raises an error or loads correctly.

There are three intact files: one with fp16 values, one with integers and one with the graph of its
network. Each mutation is read, loaded as a state_dict and loaded into a model, in a process with
limited memory; one with a graph also runs, without PyTorch. Damage (flipped
bits, cuts, splices) must raise an ArtifactError or change no tensor. Forgeries have correct
checksums, so that the later checks of the reader run; they must raise an ArtifactError or load. Any
other exception is a failure and is printed with its seed.

    python benchmarks/fuzz_artifact.py --mutations 100000
"""

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzzing import Mutation, fuzz, parse_options
from probmask import artifact, runtime
from probmask.errors import InputError, NonFiniteError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from artifact.mutations import DAMAGE, FORGERIES, GRAPH_FORGERIES, GraphSample, sample_model


def loaded_bytes(path: Path) -> dict[str, bytes]:
    """Load the file in every way and return the bytes of each tensor."""
    artifact.read(path)
    state = artifact.load_state(path)
    model = sample_model()
    artifact.load_into(model, path, strict=False)
    return {name: t.reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def run_graph(path: Path) -> dict[str, bytes]:
    """Load the file as an engine, run it, and return the bytes of its tensors and outputs."""
    state = artifact.load_state(path)
    engine = runtime.load(path, threads=1)
    tensors = {name: tensor.numpy().tobytes() for name, tensor in state.items()}
    try:
        found = engine(*(tensor.numpy() for tensor in GraphSample.inputs(3)))
    except (InputError, NonFiniteError, MemoryError):  # another graph, which takes other inputs
        return tensors
    return tensors | {str(i): array.tobytes() for i, array in enumerate(leaves(found))}


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the arrays of an output."""
    if isinstance(tree, np.ndarray):
        yield tree
    for inner in tree.values() if isinstance(tree, dict) else tree if type(tree) is list else ():
        yield from leaves(inner)


def attempt(
    mutation: Mutation,
    read: Callable[[Path], dict[str, bytes]],
    path: Path,
    intact: bytes,
    before: dict[str, bytes],
    rng: random.Random,
) -> str:
    """Mutate the intact file, load it, and compare its tensors with those from before."""
    content = mutation(intact, rng)
    path.unlink()  # a new file, because rewriting the old one would wait for the disk
    path.write_bytes(content)
    if read(path) == before:
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
                f"{mutation.__name__}, {values}": partial(
                    attempt, mutation, loaded_bytes, path, intact, before
                )
                for mutation in (*DAMAGE, *FORGERIES)
            }
        example = GraphSample.inputs(2)
        artifact.save(GraphSample().eval(), path, graph=True, example=example, overwrite=True)
        intact, before = path.read_bytes(), run_graph(path)
        kinds |= {
            f"{mutation.__name__}, graph": partial(
                attempt, mutation, run_graph, path, intact, before
            )
            for mutation in (*DAMAGE, *FORGERIES, *GRAPH_FORGERIES)
        }
        return fuzz(kinds, options)


if __name__ == "__main__":
    sys.exit(main())
