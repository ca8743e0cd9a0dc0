"""Train a sparse LSTM that predicts the next character of Python source code.

All weights of the LSTM and of the output layer share one budget. The embedding stays dense.

    python examples/recurrent.py [--quick]
"""

import argparse
import inspect
import math
import sys
from pathlib import Path

import torch
from torch import nn

import probmask

torch.set_num_threads(1)  # faster for matrices as small as these
QUICK = "--quick" in sys.argv
STEPS, HIDDEN, LENGTH, BATCH = (5, 16, 16, 8) if QUICK else (200, 96, 48, 32)
TEXT = inspect.getsource(argparse)  # 90 kB that every Python installation has
ALPHABET = sorted(set(TEXT))
CODES = torch.tensor([ALPHABET.index(character) for character in TEXT])
SPLIT = int(0.9 * len(CODES))


class CharacterModel(nn.Module):
    """Return the scores of the next character at each position."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 32)
        self.lstm = nn.LSTM(32, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, len(ALPHABET))

    def forward(self, codes):
        """Read the characters from left to right."""
        return self.head(self.lstm(self.embed(codes))[0])


def loss_of(model, codes):
    """Return the mean loss of predicting each character from those before it."""
    scores = model(codes[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), codes[:, 1:].flatten())


def trained(method):
    """Return a model trained by a method, and the summary of its masked layers."""
    torch.manual_seed(0)
    model = CharacterModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = probmask.attach(
        model, method, optimizer=optimizer, total_steps=STEPS, exclude=["embed"]
    )
    for _ in range(STEPS):
        starts = torch.randint(SPLIT - LENGTH, (BATCH, 1))
        loss = loss_of(model, CODES[starts + torch.arange(LENGTH)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval(), sparsifier.finalize()


def main():
    """Train a dense and a sparse model, and compare them on text that they have not seen."""
    unseen = CODES[SPLIT:]
    unseen = unseen[: len(unseen) // LENGTH * LENGTH].view(-1, LENGTH)
    for method in (probmask.methods.Dense(), probmask.TiedProbMask(sparsity=0.9)):
        model, summary = trained(method)
        with torch.no_grad():
            bits = loss_of(model, unseen).item() / math.log(2)
        probmask.save(model, f"{method.name}.safetensors", overwrite=True)
        size = Path(f"{method.name}.safetensors").stat().st_size
        print(f"{method.name}: {bits:.2f} bits per character, {size:,} bytes")
    print(summary)


if __name__ == "__main__":
    main()
