"""Prune a pretrained network with AdamW, from a checkpoint that torch.save wrote.

The checkpoint is trained here first; take yours instead. The trainer reads a state_dict, a
safetensors file or an artifact, and executes nothing in it. The same on the command line:

    probmask train --init pretrained.pt --sparsity 0.9 --set optimizer.name=adamw --epochs 5

    python examples/pretrained_checkpoint.py [--quick]
"""

import sys

import torch

import probmask

QUICK = "--quick" in sys.argv
SHARED = {
    "data": "digits",
    "model_args.width": 8 if QUICK else 32,
    "batch_size": 256 if QUICK else 64,
    "dense_twin": False,
    "tensorboard": False,
    "threads": 1,
}


def train(**settings):
    """Train in a new directory in runs/; a double underscore in a setting stands for a dot."""
    given = SHARED | {key.replace("__", "."): value for key, value in settings.items()}
    return probmask.train(probmask.load_config(None, list(given.items())))


def main():
    """Train a dense network, save it as PyTorch does, and prune it in a few epochs."""
    dense = train(method__name="dense", epochs=1 if QUICK else 10)
    network = probmask.load(dense.directory / "model.safetensors")
    torch.save({"state_dict": network.state_dict(), "epoch": 10}, "pretrained.pt")
    print(f"pretrained.pt: {dense.record['test']['accuracy']:.1f} %")

    for sparsity in (0.5,) if QUICK else (0.8, 0.9, 0.95):
        pruned = train(
            init="pretrained.pt",
            method__sparsity=sparsity,
            optimizer__name="adamw",
            epochs=1 if QUICK else 5,
        )
        record = pruned.record
        print(
            f"{100 * sparsity:g} % pruned: {record['test']['accuracy']:.1f} %, "
            f"{record['kept']:,} of {record['size']:,} weights, {record['bytes']:,} bytes"
        )
    print(f"the last record names its start: {record['init']}")


if __name__ == "__main__":
    main()
