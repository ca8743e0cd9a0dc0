"""Several ranks that look at data of their own before training, and decide the same."""

import pytest
import torch

from reference import two_ranks
from reference.probing import look


@pytest.mark.slow
def test_ranks_decide_together(tmp_path):
    """By what one alone would find on the data of both; and also if weights are not yet equal."""
    first, second = two_ranks.run(look, tmp_path)
    for name in ("snip", "grasp"):
        for one, other, alone in zip(first[name][0], second[name][0], first[name][1], strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, alone)
    for one, other in zip(first["other weights"], second["other weights"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
