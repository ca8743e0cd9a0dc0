"""Tied probabilities as the integral of ProbMask's probability update.

Without noise and with straight-through gradients, -Σ ∂L/∂m = (w_T² - w_0²) / (2η) + O(η). See the
docstring of probmask.methods.probmask.tied and docs/methods/probmask-tied.md.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional


def accumulated_steps(updates, rate):
    """Train 64-100-10 on digits under a fixed soft mask; return Σ -∂L/∂m and w_0, w_T."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float64) / 16
    labels = torch.tensor(digits.target)
    shapes = [(100, 64), (10, 100)]
    initial = [torch.randn(shape, dtype=torch.float64) / shape[1] ** 0.5 for shape in shapes]
    masks = [torch.rand(shape, dtype=torch.float64) for shape in shapes]
    weights = [w.clone() for w in initial]
    sums = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for _ in range(updates):
        batch = torch.randint(len(labels), (64,))
        effective = [(w * m).requires_grad_() for w, m in zip(weights, masks, strict=True)]
        hidden = functional.relu(images[batch] @ effective[0].T)
        loss = functional.cross_entropy(hidden @ effective[1].T, labels[batch])
        for total, w, g in zip(sums, weights, torch.autograd.grad(loss, effective), strict=True):
            total -= w * g  # ∂L/∂m = w g
            w -= rate * g  # straight through: the weight gets g itself
    return sums, initial, weights


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1])


@pytest.mark.parametrize(
    ("updates", "rate", "least", "most"), [(4000, 0.01, 0.99999, 1e-3), (400, 0.1, 0.9999, 1e-2)]
)
def test_the_sum_of_probability_steps_is_the_change_of_the_squared_weight(
    updates, rate, least, most
):
    sums, initial, final = accumulated_steps(updates, rate)
    for total, w_0, w_T in zip(sums, initial, final, strict=True):
        closed_form = (w_T.square() - w_0.square()) / (2 * rate)
        assert correlation(total, closed_form) > least
        assert float((total - closed_form).norm() / total.norm()) < most
        assert correlation(total, w_T.abs()) < 0.95  # unlike the plain magnitude
