"""Small tab-separated files of made-up sentences."""

import torch

WORDS = ["good", "a", "truly", "fine", "film", "with", "much", "heart", "that", "is", "never"]
WORDS += ["boring", "and", "ends", "too", "soon"]


def rows(count, *, seed=0):
    """Sentences of different lengths; the label is whether one contains the word good."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(2, len(WORDS), (), generator=random))
        order = torch.randperm(len(WORDS), generator=random)[:length]
        words = [WORDS[i] for i in order]
        made.append((" ".join(words), str(int("good" in words))))
    return made


def write(path, pairs, header=None):
    """Write a line per pair of sentence and label; return the path."""
    lines = ([header] if header else []) + ["\t".join(pair) for pair in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
