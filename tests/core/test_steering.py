"""The controller: its direction, its speed, and that it converges."""

import math

import pytest

from probmask.core.steering import pressed, steered, travel_rate


def test_the_penalty_rises_while_too_much_is_kept():
    assert steered(1.0, 0.5, 0.1, updates=100) > 1
    assert steered(1.0, 0.05, 0.1, updates=100) < 1
    assert steered(1.0, 0.1, 0.1, updates=100) == 1
    up, down = (math.log(steered(1.0, kept, 0.1, updates=100)) for kept in (0.2, 0.05))
    assert down == pytest.approx(-4 * up)
    assert pressed(1.0, 0.2, 0.1) == pytest.approx(16)
    assert pressed(3.0, 0.1, 0.1) == 3


@pytest.mark.parametrize("updates", [40, 4000])
def test_the_response_does_not_depend_on_the_number_of_updates(updates):
    knob = 1.0
    for _ in range(updates // 10):
        knob = steered(knob, 0.2, 0.1, updates=updates)
    assert knob == pytest.approx(2**2)


def test_the_penalty_stays_within_bounds():
    low = high = 1.0
    for _ in range(100):
        low = steered(low, 0.0, 0.1, updates=50)
        high = steered(high, 1.0, 0.1, updates=50)
    assert (low, high) == (1e-3, 1e3)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_slow_process_converges_to_the_target(scale):
    # At each update, the kept fraction moves by 1/50 of its distance to 1 / (1 + scale * force).
    kept, knob, updates = 1.0, 1.0, 1000
    for _ in range(updates):
        knob = steered(knob, kept, 0.1, updates=updates)
        force = pressed(knob, kept, 0.1)
        kept += (1 / (1 + scale * force) - kept) / 50
    assert kept == pytest.approx(0.1, rel=0.05)


def test_the_rate_covers_the_distance():
    updates = 500
    rate = travel_rate(3.0, updates, most=1.0)
    passed = sum(rate * (1 + math.cos(math.pi * t / updates)) / 2 for t in range(updates))
    assert passed == pytest.approx(3.0, rel=0.01)
    assert travel_rate(3.0, 5, most=0.1) == 0.1
