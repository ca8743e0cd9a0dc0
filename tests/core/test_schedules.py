"""The schedules at their ends and in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probmask.core.schedules import cosine, kept_fraction, temperature, warm_up

fraction = st.floats(0, 1)


def test_temperature_falls_linearly_from_1_to_0_03():
    assert temperature(0) == 1.0
    assert temperature(0.5) == pytest.approx(0.515)
    assert temperature(1) == pytest.approx(0.03)
    assert temperature(1, start=2, end=0.5) == 0.5


def test_kept_fraction_of_the_paper_on_cifar():
    """300 epochs, t1 = 48, t2 = 180, k_f = 0.01."""
    kept = [kept_fraction(t / 300, 0.01) for t in range(301)]
    assert kept[:49] == [1.0] * 49
    assert kept[49] == pytest.approx(0.01 + 0.99 * (1 - 1 / 132) ** 3)
    assert kept[114] == pytest.approx(0.01 + 0.99 * 0.125)
    assert kept[180:] == [0.01] * 121


@given(fraction, fraction, fraction)
def test_kept_fraction_is_monotonic_and_bounded(first, second, final):
    early, late = sorted([first, second])
    assert (
        final - 1e-12
        <= kept_fraction(late, final)
        <= kept_fraction(early, final) + 1e-12
        <= 1 + 1e-9
    )


def test_a_ramp_of_length_zero():
    assert kept_fraction(0.2, 0.1, begin=0.3, end=0.3) == 1.0
    assert kept_fraction(0.3, 0.1, begin=0.3, end=0.3) == 0.1


def test_cosine_and_warm_up():
    assert cosine(0) == 1
    assert cosine(0.5) == pytest.approx(0.5)
    assert cosine(1) == pytest.approx(0)
    assert warm_up(0.01, until=0.1) == pytest.approx(0.1)
    assert warm_up(0.1, until=0.1) == 1
    assert warm_up(0.0, until=0.0) == 1
