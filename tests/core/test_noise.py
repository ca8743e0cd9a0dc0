"""Noise by generators and by hashing: reproducible, independent, and of the right distribution."""

import math

import pytest
import torch

from probmask.core.noise import (
    Stream,
    draw_key,
    fold,
    hashed,
    logistic,
    logistic_,
    normal_,
    uniform_,
    uniforms,
)
from probmask.core.relaxation_kernels import uniforms as compiled_uniforms
from reference.masked_draw import uniform

COUNT = 1 << 20
KEYS = [draw_key(3, 0, step, 0, 0) for step in range(4)] + [draw_key(0), (0, 0), (0, 1)]


def sample(key, count=COUNT):
    return uniforms(torch.Size([count]), torch.tensor(key))


def correlation(x, y):
    """Return the correlation in units of its standard deviation under independence."""
    x, y = x.double() - 0.5, y.double() - 0.5
    return float((x * y).mean() * 12 * math.sqrt(len(x)))


def test_fold_depends_on_the_seed_on_every_counter_and_on_their_order():
    values = [fold(0), fold(1), fold(0, 0), fold(0, 1), fold(0, 0, 1), fold(0, 1, 0), fold(0, -1)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)
    assert fold(5, 6, 7) == fold(5, 6, 7)


def test_a_change_of_one_bit_changes_half_the_bits():
    changed = [(fold(3, 1 << bit) ^ fold(3, 0)).bit_count() for bit in range(60)]
    assert 24 < sum(changed) / len(changed) < 39


def test_noise_is_a_function_of_the_counters():
    first = logistic_(torch.empty(1000), 1, 2, 3)
    assert torch.equal(first, logistic_(torch.empty(1000), 1, 2, 3))
    other = logistic_(torch.empty(1000), 1, 2, 4)
    correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
    assert abs(correlation) < 0.15


def test_the_global_generator_does_not_change():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    uniform_(torch.empty(10), 1)
    assert torch.equal(state, torch.get_rng_state())


def test_generated_noise_is_finite_and_logistic():
    sample = logistic_(torch.empty(4_000_000), 11).double()
    assert sample.isfinite().all()
    assert sample.mean() == pytest.approx(0, abs=0.005)
    assert sample.var() == pytest.approx(torch.pi**2 / 3, rel=0.005)
    quantiles = torch.quantile(sample[:1_000_000], torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert quantiles.tolist() == pytest.approx([-2.1972, 2.1972], abs=0.02)


def test_normal_noise_is_normal_and_a_function_of_the_counters():
    sample = normal_(torch.empty(1_000_000), 11, 2)
    assert sample.mean() == pytest.approx(0, abs=0.005)
    assert sample.var() == pytest.approx(1, rel=0.01)
    assert torch.equal(sample, normal_(torch.empty(1_000_000), 11, 2))
    assert not torch.equal(sample, normal_(torch.empty(1_000_000), 11, 3))


def test_streams_are_distinct_and_never_an_update_number():
    assert len({stream.value for stream in Stream}) == len(Stream.__members__)
    assert all(stream < 0 for stream in Stream)
    assert Stream.SPARSE_START == -1
    assert Stream.REINITIALIZATION == -2
    assert Stream.PROBE_BATCHES == -3
    assert fold(5, Stream.REINITIALIZATION, 3) == fold(5, -2, 3)


@pytest.mark.parametrize("key", KEYS)
def test_plain_compiled_and_reference_hash_have_the_same_bits(key):
    plain = sample(key, 5000)
    assert plain.tolist() == [uniform(position, key) for position in range(5000)]
    found = torch.empty(4000)
    compiled_uniforms(found.numpy(), 1000, *(torch.tensor(key).numpy().astype("uint32")))
    assert torch.equal(found, plain[1000:])


def test_every_counter_changes_the_key():
    keys = {draw_key(*c) for c in [(0,), (1,), (0, 0), (0, 1), (0, 0, 1), (0, 1, 0), (0, -1)]}
    assert len(keys) == 7
    assert all(0 <= word < 2**32 for key in keys for word in key)


def test_positions_count_modulo_two_to_the_32():
    near = torch.tensor([0, 1, 2**32 - 1])
    key = torch.tensor(draw_key(4))
    assert torch.equal(hashed(near, key), hashed(near + 2**32, key))


@pytest.mark.parametrize("key", KEYS)
def test_uniforms_are_uniform(key):
    u = sample(key).double()
    assert 0 < u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    assert abs(u.mean() - 0.5) * math.sqrt(12 * COUNT) < 4.5
    assert u.var() == pytest.approx(1 / 12, rel=5e-3)
    ranks = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    distance = (u.sort().values - ranks).abs().max() * math.sqrt(COUNT)
    assert distance < 2.2  # Kolmogorov-Smirnov statistic: exceeded with probability 1/8,000


@pytest.mark.parametrize("key", KEYS)
def test_neighboring_weights_are_independent(key):
    """Distances of 1 to 64, and those of rows, channels and filters of usual convolutions."""
    u = sample(key)
    for distance in (*range(1, 65), 144, 288, 576, 1152, 2304, 4608, 1 << 16):
        assert abs(correlation(u[:-distance], u[distance:])) < 5, distance


def test_pairs_and_triples_fill_the_square_and_the_cube():
    u = sample(KEYS[0], 3 << 18)
    for dimensions, cells in ((2, 64), (3, 16)):
        points = (u[: len(u) // dimensions * dimensions].view(-1, dimensions) * cells).long()
        index = (points * cells ** torch.arange(dimensions)).sum(1)
        counts = torch.bincount(index, minlength=cells**dimensions).double()
        mean = len(points) / cells**dimensions
        chi2 = float(((counts - mean) ** 2 / mean).sum())
        freedom = cells**dimensions - 1
        assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


def test_steps_layers_ranks_and_draws_are_independent():
    first = sample(draw_key(1, 0, 100, 0, 0))
    for counters in [(0, 101, 0, 0), (0, 100, 1, 0), (0, 100, 0, 1), (1, 100, 0, 0), (0, 99, 0, 0)]:
        other = sample(draw_key(1, *counters))
        for distance in (0, 1, 2, 64, 4608):
            shifted = other[distance:], first[: COUNT - distance]
            assert abs(correlation(*shifted)) < 5, (counters, distance)


def test_keys_that_differ_in_one_bit_give_independent_sequences():
    """They are not shifted copies either, as they would be for a hash of position + key."""
    first = sample((1000, 77), 1 << 16)
    for bit in range(32):
        for other in ((1000 ^ 1 << bit, 77), (1000, 77 ^ 1 << bit)):
            assert abs(correlation(first, sample(other, 1 << 16))) < 5.5, other


def test_one_bit_of_the_position_changes_each_bit_half_of_the_time():
    positions = torch.arange(1 << 15)
    key = torch.tensor(KEYS[1])
    base = hashed(positions, key)
    for bit in range(20):
        changed = base ^ hashed(positions ^ (1 << bit), key)
        share = torch.stack([(changed >> b & 1).double().mean() for b in range(9, 32)])
        assert (share - 0.5).abs().max() < 0.03, bit


def test_the_noise_of_one_weight_over_many_steps_is_uniform():
    """The same position under the keys of successive steps."""
    keys = torch.tensor([draw_key(2, 0, step, 0, 5) for step in range(20_000)])
    bits = hashed(torch.tensor(12345), keys.T)
    u = (bits >> 9).double() / 2**23
    ranks = (torch.arange(len(u), dtype=torch.float64) + 0.5) / len(u)
    assert (u.sort().values - ranks).abs().max() * math.sqrt(len(u)) < 2.2
    assert abs(correlation(u[1:], u[:-1])) < 4.5


def test_hashed_noise_is_finite_and_logistic():
    noise = logistic(torch.Size([4 * COUNT]), torch.tensor(KEYS[0])).double()
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0, abs=0.005)
    assert noise.var() == pytest.approx(torch.pi**2 / 3, rel=0.005)
    values = noise[:COUNT].sort().values
    ranks = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    assert (values.sigmoid() - ranks).abs().max() * math.sqrt(COUNT) < 2.2
