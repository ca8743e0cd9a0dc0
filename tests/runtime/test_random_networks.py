"""Random networks give the same results on the kernels as in PyTorch."""

import pytest
import torch

import probmask
from probmask.runtime.plan.partition import Choices, steps_of
from runtime.comparing import assert_close
from runtime.random_networks import RandomNetwork, RandomTokens


# PyTorch warns about the copy that it makes for even kernel sizes.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("seed", range(14))
@pytest.mark.parametrize("network", [RandomNetwork, RandomTokens])
def test_a_random_network_agrees_with_pytorch(network, seed):
    """Check it image by image, in groups, in PyTorch, and partly on the kernels."""
    net = network(seed).eval()
    draw = torch.Generator().manual_seed(seed)
    batches = {n: torch.randn(n, *net.input_shape, generator=draw) for n in (0, 1, 4, 18)}
    engine = probmask.runtime.compile(net, batches[4], threads=1 + seed % 2, layers="sparse")
    with torch.no_grad():
        expected = {n: net(x.clone()) for n, x in batches.items()}
    everywhere = sorted(engine.choices.sparse)
    some = frozenset(everywhere[seed % 2 :: 2])
    for sparse in (frozenset(everywhere), some, frozenset()):
        steps = [step for step in steps_of(engine.network, set(sparse)) if step.sparse]
        for ungrouped in ({}, {step.nodes[0].name: len(step.nodes) // 2 for step in steps}):
            engine.use(Choices(sparse, ungrouped))
            for n, x in batches.items():
                assert_close(engine(x.clone()), expected[n])
