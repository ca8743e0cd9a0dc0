"""Dropping and growing weights, as pure functions."""

import math

import pytest
import torch

from probmask.masking.sites import find_sites
from probmask.methods.families.exchange import (
    at_random,
    cosine_decay,
    drop_smallest,
    exchange,
    gradient_magnitude,
    interval,
    is_due,
    largest,
    random_masks,
)
from reference.exchange_run import mixed


def mask(*indices, size=8):
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[list(indices)] = True
    return chosen


def test_largest_considers_only_the_given_entries():
    scores = torch.tensor([9.0, 1.0, 5.0, 0.0, 7.0, 3.0])
    among = mask(1, 2, 3, 5, size=6)
    assert torch.equal(largest(scores, among, 2), mask(2, 5, size=6))
    assert torch.equal(largest(scores, among, 4), among)
    assert not largest(scores, among, 0).any()


def test_a_zero_score_beats_entries_that_are_not_given():
    assert torch.equal(largest(torch.zeros(4), mask(2, 3, size=4), 1), mask(2, size=4))


def test_ties_go_to_the_lower_index():
    assert torch.equal(largest(torch.ones(8), mask(1, 4, 6), 2), mask(1, 4))


def test_the_smallest_active_ones_are_dropped():
    sizes = torch.tensor([0.1, 0.5, 0.3, 0.9, 0.0, 0.0, 0.0, 0.0])
    assert torch.equal(drop_smallest(sizes, mask(0, 1, 2, 3), 2), mask(1, 3))


def test_an_exchange_by_hand():
    sizes = torch.tensor([0.1, 0.5, 0.3, 0.9, 0.0, 0.0, 0.0, 0.0])
    scores = torch.tensor([1.0, 1.0, 1.0, 1.0, 5.0, 0.0, 7.0, 3.0])
    assert torch.equal(exchange(sizes, mask(0, 1, 2, 3), scores, 2), mask(1, 3, 4, 6))


def test_dropped_weights_can_return_immediately():
    sizes = torch.tensor([0.1, 0.5, 0.3, 0.9, 0.0, 0.0, 0.0, 0.0])
    scores = torch.tensor([6.0, 1.0, 1.0, 1.0, 5.0, 0.0, 7.0, 3.0])
    assert torch.equal(exchange(sizes, mask(0, 1, 2, 3), scores, 2), mask(0, 1, 3, 6))


def test_a_dense_layer_does_not_change():
    assert exchange(torch.rand(8), mask(*range(8)), torch.rand(8), 3).all()


@pytest.mark.parametrize("seed", range(5))
def test_an_exchange_is_what_sorting_gives(seed):
    torch.manual_seed(seed)
    sizes, scores, active = torch.rand(50), torch.rand(50), torch.rand(50) < 0.4
    on = sorted(active.nonzero().flatten().tolist(), key=lambda i: sizes[i])
    count = len(on) // 3
    left = set(on[count:])
    off = sorted(set(range(50)) - left, key=lambda i: -scores[i])
    expected = left | set(off[:count])
    found = exchange(sizes, active, scores, count)
    assert set(found.nonzero().flatten().tolist()) == expected


def test_drawing_is_uniform():
    among = mask(0, 2, 3, 5, 7)
    hits = sum(at_random(among, 2, 0, draw).int() for draw in range(400))
    assert not hits[~among].any()
    assert hits.sum() == 800
    assert (hits[among] - 160).abs().max() < 5 * math.sqrt(400 * 0.4 * 0.6)


def test_drawing_depends_on_seed_and_counters_alone():
    among = torch.ones(100, dtype=torch.bool)
    assert torch.equal(at_random(among, 10, 1, 2, 3), at_random(among, 10, 1, 2, 3))
    assert not torch.equal(at_random(among, 10, 1, 2, 3), at_random(among, 10, 1, 3, 2))


def test_the_interval_between_exchanges():
    assert interval(None, 100, 60_000) == 100
    assert interval(None, 100, 60) == 3
    assert interval(None, 100, 5) == 1
    assert interval(7, 100, 5) == 7
    assert [step for step in range(10) if is_due(step, 3)] == [3, 6, 9]


def test_cosine_decay():
    assert cosine_decay(0, 0.5, 0.1) == 0.5
    assert cosine_decay(0.5, 0.5, 0.1) == pytest.approx(0.3)
    assert cosine_decay(1, 0.5, 0.1) == pytest.approx(0.1)
    assert cosine_decay(2, 0.5, 0.1) == pytest.approx(0.1)


def test_a_missing_gradient_counts_as_zero():
    weight = torch.ones(3, requires_grad=True)
    assert torch.equal(gradient_magnitude(weight), torch.zeros(3))


# Random initial masks


def test_the_start_is_random_and_exact():
    sites = find_sites(mixed())
    one, same, other = (random_masks(sites, [14, 15, 100, 5], seed) for seed in (1, 1, 2))
    assert [int(m.sum()) for m in one] == [14, 15, 100, 5]
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
