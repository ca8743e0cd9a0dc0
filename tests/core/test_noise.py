import pytest
import torch

from probmask.core.noise import Stream, fold, logistic_, normal_, uniform_


def test_fold_depends_on_the_seed_on_every_counter_and_on_their_order():
    values = [fold(0), fold(1), fold(0, 0), fold(0, 1), fold(0, 0, 1), fold(0, 1, 0), fold(0, -1)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 2**63 for value in values)
    assert fold(5, 6, 7) == fold(5, 6, 7)


def test_a_change_of_one_bit_changes_half_the_bits():
    changed = [(fold(3, 1 << bit) ^ fold(3, 0)).bit_count() for bit in range(60)]
    assert 24 < sum(changed) / len(changed) < 39


def test_the_same_counters_give_the_same_noise_and_others_give_other_noise():
    first = logistic_(torch.empty(1000), 1, 2, 3)
    assert torch.equal(first, logistic_(torch.empty(1000), 1, 2, 3))
    other = logistic_(torch.empty(1000), 1, 2, 4)
    correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
    assert abs(correlation) < 0.15


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    uniform_(torch.empty(10), 1)
    assert torch.equal(state, torch.get_rng_state())


def test_noise_is_finite_and_logistic():
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
