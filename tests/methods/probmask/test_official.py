"""compat="official" through attach() against the reference of the released training step."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from probmask.core.noise import uniform_
from reference import official as twin

SEED = 13
EPOCHS, PER_EPOCH = 13, 4  # t1 = 2, t2 = 7: dense, ramp and final phases all get several updates
FINAL = 0.2


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 3, bias=False),
    )


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 1, 6, 6), torch.randint(3, (8,))) for _ in range(EPOCHS * PER_EPOCH)]


def network(weights, others, batch):
    """Return the loss of the same network as a function of lists of parameters."""
    x, y = batch
    x = functional.conv2d(x, weights[0], padding=1)
    x = functional.relu(functional.batch_norm(x, None, None, others[0], others[1], training=True))
    x = functional.conv2d(x, weights[1], stride=2, groups=2)
    x = functional.relu(functional.batch_norm(x, None, None, others[2], others[3], training=True))
    return functional.cross_entropy(functional.linear(x.flatten(1), weights[2]), y)


def uniforms_for(shapes):
    def uniforms(step, draw):
        return [
            tuple(uniform_(torch.empty(shape), SEED, 0, step, draw, index, k) for k in (0, 1))
            for index, shape in enumerate(shapes)
        ]

    return uniforms


def by_twin(draws, epochs):
    model = build()
    w = [model[0].weight, model[3].weight, model[7].weight]
    others = [model[1].weight, model[1].bias, model[4].weight, model[4].bias]
    s = [torch.ones_like(weight).requires_grad_() for weight in w]
    twin.train(
        w,
        others,
        s,
        network,
        batches(),
        uniforms_for([weight.shape for weight in w]),
        epochs=epochs,
        per_epoch=PER_EPOCH,
        final=FINAL,
        lr=0.1,
        draws=draws,
    )
    return w, others, s


def by_attach(draws, epochs):
    model = build()
    w = [model[0].weight, model[3].weight, model[7].weight]
    others = [model[1].weight, model[1].bias, model[4].weight, model[4].bias]
    # Weights before BatchNorm, as in the reference: the joint norm is summed in this order.
    optimizer = torch.optim.SGD([*w, *others], lr=0.1, momentum=0.9, weight_decay=5e-4)
    method = probmask.ProbMask(sparsity=1 - FINAL, compat="official", draws=draws)
    sparsifier = probmask.attach(
        model,
        method,
        optimizer=optimizer,
        total_steps=epochs * PER_EPOCH,
        steps_per_epoch=PER_EPOCH,
        seed=SEED,
    )
    for count, (x, y) in enumerate(batches()[: epochs * PER_EPOCH]):
        factor = 0.5 * (1 + math.cos(math.pi * (count // PER_EPOCH) / epochs))
        optimizer.param_groups[0]["lr"] = 0.1 * factor
        optimizer.zero_grad()
        for share in sparsifier.draws():
            (share * functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
    s = [module._masked_weights["weight"].prob for module in (model[0], model[3], model[7])]
    return model, sparsifier, w, others, s


@pytest.mark.filterwarnings("ignore::probmask.LayerCollapseWarning")
@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("epochs", [1, 5, EPOCHS])
def test_the_released_step_bit_for_bit(draws, epochs):
    w, others, s = by_twin(draws, epochs)
    _, _, our_w, our_others, our_s = by_attach(draws, epochs)
    for ours, theirs in zip([*our_s, *our_w, *our_others], [*s, *w, *others], strict=True):
        assert torch.equal(ours, theirs)
    if epochs == EPOCHS:  # the compared values have changed
        flat = torch.cat([prob.detach().flatten() for prob in s])
        assert flat.sum().item() == pytest.approx(FINAL * len(flat), rel=0.02)
        assert len(flat.unique()) > 20


@pytest.mark.filterwarnings("ignore::probmask.LayerCollapseWarning")
def test_it_is_not_frozen_early_and_ends_at_the_exact_budget():
    model, sparsifier, w, _, _ = by_attach(2, EPOCHS)
    assert not sparsifier._masker.frozen
    size = sum(weight.numel() for weight in w)
    assert sparsifier.finalize().kept == size - round((1 - FINAL) * size)
    assert sum(int(weight.count_nonzero()) for weight in w) == size - round((1 - FINAL) * size)
    assert type(model[0]) is nn.Conv2d


def test_the_first_update_moves_every_probability_away_from_one():
    """While everything is kept, the bisection subtracts its last midpoint."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = probmask.ProbMask(sparsity=0.8, compat="official")
    probmask.attach(
        model, method, optimizer=optimizer, total_steps=100, steps_per_epoch=10, seed=SEED
    )
    x, y = batches()[0]
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    probs = [module._masked_weights["weight"].prob for module in (model[0], model[3], model[7])]
    (value,) = torch.cat([prob.detach().flatten() for prob in probs]).unique().tolist()
    assert 2.0**-21 <= 1 - value < 1e-3
    assert math.log2(1 - value).is_integer()


def test_the_joint_gradient_is_clipped_to_three():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = probmask.ProbMask(sparsity=0.8, compat="official")
    probmask.attach(
        model, method, optimizer=optimizer, total_steps=100, steps_per_epoch=10, seed=SEED
    )
    x, y = batches()[0]
    (1000 * functional.cross_entropy(model(x), y)).backward()
    optimizer.step()
    norm = torch.stack([p.grad.norm() for p in optimizer.param_groups[0]["params"]]).norm()
    assert norm.item() == pytest.approx(3, rel=1e-4)


@pytest.mark.filterwarnings("ignore::probmask.LayerCollapseWarning")
def test_layerwise_budgets_with_the_released_arithmetic():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = probmask.ProbMask(sparsity=0.8, compat="official", scope="layer")
    sparsifier = probmask.attach(
        model, method, optimizer=optimizer, total_steps=52, steps_per_epoch=4, seed=SEED
    )
    for x, y in batches():
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for module in (model[0], model[3], model[7]):
        prob = module._masked_weights["weight"].prob
        assert 0.9 * 0.2 * prob.numel() < prob.sum().item() <= 0.2 * prob.numel() + 0.01
    assert sparsifier.now.epochs == 13
