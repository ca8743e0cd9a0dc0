"""Why `torch.export` cannot export a model, in one line."""

import re
import traceback
from pathlib import Path

import torch
from torch.nn.utils import rnn

from probmask.messages import one_line

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+(?:\n[ \t]+([^\n]+))?')
_PACKING = (rnn.pack_padded_sequence.__code__, rnn.pack_sequence.__code__)
_MOST_CHARACTERS = 300


def reason_of(error: Exception) -> str:
    """Return what is wrong with the model, and what to do about it if that is known."""
    text = str(error).lower()
    if _packs(error):
        return "packed sequences cannot be compiled; pass padded tensors."
    if "data-dependent" in text:
        place = place_of(error)
        return (
            "torch.export cannot export it: which operations forward runs depends on the values of "
            f"a tensor{f' ({place})' if place else ''}. Use torch.where, or torch.cond with "
            "branches that do not return an input unchanged."
        )
    if "aliasing the input" in text:
        return (
            "torch.export cannot export it: a branch of torch.cond returns one of its inputs "
            "unchanged, or a view of it; return a copy, as by clone()."
        )
    # PyTorch appends the graph and advice about itself to its reason, as further paragraphs.
    reason = str(error).strip().split("\n\n")[0]
    return f"torch.export cannot export it: {' '.join(reason.split())[:_MOST_CHARACTERS]}"


def reason_in_eager_mode(error: Exception) -> str:
    """Return why the model itself does not run."""
    return f"the model does not run on the example: {one_line(error)[:_MOST_CHARACTERS]}"


def place_of(error: Exception) -> str:
    """Return the last place in code outside of PyTorch that a message names."""
    own = str(Path(torch.__file__).parent)
    places = [found for found in _PLACE.findall(str(error)) if not found[0].startswith(own)]
    if not places:
        return ""
    path, line, code = places[-1]
    return f"{Path(path).name}, line {line}{f': {code.strip()[:100]}' if code else ''}"


def _packs(error: Exception) -> bool:
    """Return whether the model packed a sequence, or held a packed one, when it failed."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_code in _PACKING
        or any(isinstance(value, rnn.PackedSequence) for value in frame.f_locals.values())
        for frame in frames
    )
