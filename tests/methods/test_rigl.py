"""RigL: which weights are dropped and grown, and when."""

import math

import pytest
import torch
from torch import nn

from probmask import InputError
from probmask.methods.rigl import RigL
from reference.exchange_run import Run, assert_budget_throughout, assert_resumes, batches
from reference.networks import loss_of, step


def test_the_number_of_weights_is_constant():
    assert_budget_throughout(RigL, update_every=3)


def test_other_settings_resume_too():
    assert_resumes(RigL, allocation="er", update_every=2, replace_update=True, stops=(4, 7))


class Dot(nn.Module):
    """Output w · x, so that the gradient of w is x."""

    def __init__(self):
        super().__init__()
        self.only = nn.Linear(8, 1, bias=False)

    def forward(self, x):
        return self.only(x).sum()


def by_hand(x, lr=0.0, **settings):
    model = Dot()
    with torch.no_grad():
        model.only.weight.copy_(torch.tensor([[0.1, -0.5, 0.3, 0.9, 1, 1, 1, 1]]))
    method = RigL(sparsity=0.5, drop_fraction=0.6, update_every=1, **settings)
    run = Run(method, model=model, total_steps=1000, lr=lr, weight_decay=0.0)
    weight = model.only._parameters["weight"]
    with torch.no_grad():
        weight.copy_(torch.tensor([[0.1, -0.5, 0.3, 0.9, 0, 0, 0, 0]]))
        run.activate([torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]]).bool()])
    for inputs in (torch.ones(8), torch.tensor(x)):  # the second update is the first exchange
        run.optimizer.zero_grad()
        model(inputs).backward()
        run.optimizer.step()
    return run, weight.detach()[0]


def test_the_sets_by_hand():
    # Of 4 active weights, ⌊0.6 · 4⌋ = 2 are dropped: 0.1 and 0.3. Those with 7 and 5 are grown.
    run, weight = by_hand([1.0, 1, 1, 1, 5, 0, -7, 3])
    assert run.active[0][0].nonzero().flatten().tolist() == [1, 3, 4, 6]
    assert weight.tolist() == pytest.approx([0, -0.5, 0, 0.9, 0, 0, 0, 0])


def test_a_weight_dropped_and_grown_in_one_update_keeps_its_value():
    run, weight = by_hand([6.0, 1, 1, 1, 5, 0, -7, 3])
    assert run.active[0][0].nonzero().flatten().tolist() == [0, 1, 3, 6]
    assert weight.tolist() == pytest.approx([0.1, -0.5, 0, 0.9, 0, 0, 0, 0])
    assert run.momentum(0)[0, 0] == pytest.approx(0.9 * 1 + 6)


def test_grown_weights_start_at_zero_without_momentum():
    run, weight = by_hand([1.0, 1, 1, 1, 5, 0, -7, 3], lr=0.01)
    assert weight[4] == 0
    assert weight[6] == 0
    assert run.momentum(0)[0, [4, 6]].tolist() == [0, 0]
    assert weight[1] == pytest.approx(-0.5 - 0.01 - 0.01 * 1.9)  # survivors are updated


def test_the_exchange_can_replace_the_update():
    run, weight = by_hand([1.0, 1, 1, 1, 5, 0, -7, 3], lr=0.01, replace_update=True)
    assert run.active[0][0].nonzero().flatten().tolist() == [1, 3, 4, 6]
    assert weight.tolist() == pytest.approx([0, -0.51, 0, 0.89, 0, 0, 0, 0])
    assert run.momentum(0)[0, 1] == 1


def test_every_exchange_is_what_sorting_gives():
    run = Run(RigL(sparsity=0.8, update_every=4))
    for number, batch in enumerate(batches()):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        gradients = [w.grad.abs().flatten() for w in run.masker.weights]
        sizes = [w.abs().flatten() for w in run.weights]
        before = list(zip(sizes, gradients, [a.flatten() for a in run.active], strict=True))
        run.optimizer.step()
        if not (number % 4 == 0 and 0 < number < 30):
            assert all(
                torch.equal(b[2], a.flatten()) for b, a in zip(before, run.active, strict=True)
            )
            continue
        for (w, g, a), after in zip(before, run.active, strict=True):
            part = 0.3 * (1 + math.cos(math.pi * number / 30)) / 2
            on = sorted(a.nonzero().flatten().tolist(), key=lambda i: float(w[i]))
            count = math.floor(part * len(on))
            left = set(on[count:])
            off = sorted(set(range(len(w))) - left, key=lambda i: (-float(g[i]), i))
            assert set(after.flatten().nonzero().flatten().tolist()) == left | set(off[:count])


def test_dense_gradients_only_when_they_are_needed():
    run = Run(RigL(sparsity=0.8, update_every=5))
    for number, batch in enumerate(batches()):
        run.optimizer.zero_grad()
        loss_of(run.model, batch).backward()
        outside = any(
            bool(w.grad[~a].any()) for w, a in zip(run.masker.weights, run.active, strict=True)
        )
        assert outside == (number in (5, 10, 15, 20, 25))
        run.optimizer.step()


def test_exchanges_follow_the_interval_until_they_stop():
    assert Run(RigL(sparsity=0.8)).exchanges(batches()) == list(range(2, 28, 2))  # then q is 0
    assert Run(RigL(sparsity=0.8, update_every=7)).exchanges(batches()) == [7, 14, 21]
    assert Run(RigL(sparsity=0.8, stop_at=0.3)).exchanges(batches()) == [2, 4, 6, 8, 10]
    assert Run(RigL(sparsity=0.8, stop_at=0.0)).exchanges(batches()) == []
    assert Run(RigL(sparsity=0.8), total_steps=10**6).masker.every == 100


@pytest.mark.parametrize("allocation", ["uniform", "er", "erk"])
def test_each_layer_keeps_its_number(allocation):
    run = Run(RigL(sparsity=0.8, allocation=allocation))
    before = run.counts
    assert run.train(batches()).counts == before
    assert (before[0] == 144) == (allocation == "uniform")


def test_dense_ends_are_options():
    assert Run(RigL(sparsity=0.8, allocation="uniform", dense_first=False)).counts[0] == 29
    run = Run(RigL(sparsity=0.8, dense_first=True, dense_last=True)).train(batches())
    assert (run.counts[0], run.counts[3]) == (144, 36)


def test_a_dense_first_layer_that_exceeds_the_budget_raises():
    text = r"RigL\(sparsity=0\.95\): the dense layers alone hold 144 weights, the budget is 93 of"
    with pytest.raises(InputError, match=text):
        Run(RigL(sparsity=0.95, allocation="uniform"))


def test_adam_and_accumulated_gradients():
    run = Run(RigL(sparsity=0.8, update_every=3), make=lambda m: torch.optim.Adam(m.parameters()))
    some = batches()
    for first, second in zip(some[::2], some[1::2], strict=True):
        run.optimizer.zero_grad()
        loss_of(run.model, first).backward()
        loss_of(run.model, second).backward()
        run.optimizer.step()
    assert sum(run.counts) == 372


def test_evaluation_uses_the_current_mask():
    run = Run(RigL(sparsity=0.8, update_every=1))
    for batch in batches(5):
        step(run.model, run.optimizer, batch)
        run.model.eval()
        for index, layer in enumerate(run.model[i] for i in (0, 2, 5, 7)):
            assert not layer.weight[~run.active[index]].any()
        run.model.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allocation": "ERK"}, "RigL(allocation='ERK'): must be one of 'uniform', 'er', 'erk'."),
        ({"dense_first": 2}, "RigL(dense_first=2): must be one of None, True, False."),
        ({"dense_last": None}, "RigL(dense_last=None): must be one of True, False."),
        (
            {"drop_fraction": 1.5},
            "RigL(drop_fraction=1.5): must be a fraction of a layer, from 0 to 1.",
        ),
        ({"stop_at": -1}, "RigL(stop_at=-1): must be a fraction of the training, from 0 to 1."),
        (
            {"update_every": 0},
            "RigL(update_every=0): must be a number of updates, an integer of at least 1.",
        ),
        ({"replace_update": "yes"}, "RigL(replace_update='yes'): must be one of True, False."),
        ({"sparsity": 90}, "RigL(sparsity=90): sparsity is the fraction pruned, in [0, 1)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError) as error:
        RigL(**{"sparsity": 0.9, **settings})
    assert str(error.value).startswith(message)


def test_keeping_nothing_raises():
    with pytest.raises(InputError, match="none of the 1860 weights would be kept; lower sparsity"):
        Run(RigL(sparsity=0.9999))
