"""Networks of which a rank builds its rows only."""

import sys

import pytest
import torch
from torch import nn

from probmask.models import build_model
from probmask.training.sharded_building import Blueprint, build_seeded
from training.ranks import built_under_limit, finish, start_ranks, trained_under_limit
from training.small import start

RANKS, SEED = 3, 7


class Odd(nn.Module):
    """Initializes a weight three times, one from another, and has more ranks than rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.other = nn.Parameter(torch.empty(7, 5))
        self.register_buffer("positions", torch.arange(4.0), persistent=False)
        self.register_buffer("running", torch.rand(3))
        nn.init.normal_(self.other)
        with torch.no_grad():
            self.layer.weight.copy_(self.other[2:4] + torch.randn(2, 5))
            self.layer.bias.fill_(0.5)


class ReadsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
        self.largest = float(self.layer.weight.max())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight


def build_of(network):
    return (lambda: build_model(network)) if isinstance(network, str) else network


@pytest.mark.parametrize("network", ["smallconv", "resnet20", "vit", "text_encoder", Odd])
def test_the_rows_of_all_ranks_are_those_of_the_whole_network(network):
    build = build_of(network)
    whole = build_seeded(build, SEED)
    after = torch.rand(3)
    parts = []
    for rank in range(RANKS):
        model, rows = Blueprint.of(build).build_rows(seed=SEED, rank=rank, ranks=RANKS)
        assert torch.equal(torch.rand(3), after)  # as many random numbers were drawn
        assert all(parameter.is_meta for parameter in model.parameters())
        parts.append(rows)
        for (name, buffer), (_, found) in zip(
            whole.named_buffers(), model.named_buffers(), strict=True
        ):
            assert torch.equal(buffer, found), name
    assert parts[0].keys() == dict(whole.named_parameters()).keys()
    for name, parameter in whole.named_parameters():
        assert torch.equal(torch.cat([rows[name] for rows in parts]), parameter), name


@pytest.mark.parametrize("network", [ReadsValues, Tied])
def test_a_network_that_needs_its_values_or_shares_them_is_built_whole(network, caplog):
    with caplog.at_level("INFO", logger="probmask"):
        assert Blueprint.of(network) is None
    assert "every rank builds the whole network" in caplog.text


def test_a_network_that_is_built_in_another_way_without_memory_is_built_whole():
    """PyTorch skips this initialization on the meta device."""

    def build():
        layer = nn.Linear(5, 2)
        nn.init.trunc_normal_(layer.weight)
        return layer

    model, rows = Blueprint.of(build).build_rows(seed=SEED, rank=1, ranks=RANKS)
    assert rows == {}
    assert torch.equal(model.weight, build_seeded(build, SEED).weight)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is that of Linux")


@LINUX
def test_a_rank_never_holds_the_whole_network():
    for ranks, code in ((1, 1), (4, 0)):
        process = start(built_under_limit, ranks)
        process.join(60)
        assert process.exitcode == code


@LINUX
def test_a_network_that_does_not_fit_one_rank_is_trained_on_two(tmp_path):
    """31 million weights, gradients, momenta, masks and the memory of a cut take over 1.2 GB.

    The limit holds from the start of the command to the artifact, checkpoints included.
    """
    one = start(trained_under_limit, 0, 1, 0, tmp_path / "one")
    one.join(240)
    assert one.exitcode != 0
    finish(start_ranks(trained_under_limit, tmp_path / "two"))
    assert (tmp_path / "two" / "record.json").exists()
