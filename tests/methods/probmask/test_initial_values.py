"""Tied probabilities: the initial values fade out, or are discounted, as in the reference."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from reference import probmask_tied as twin
from reference.networks import (
    assert_same_state,
    build,
    loss_of,
    make_batches,
    sgd,
    state_of,
    step,
    train,
)
from reference.probmask_run import STEPS, begin, parts


def conv_network(weights, others, batch):
    """Return the loss of `conv_net` as a function of lists of parameters."""
    x, y = batch
    gamma, beta, bias = others
    x = functional.conv2d(x.double(), weights[0], padding=1)
    x = functional.batch_norm(x, None, None, gamma, beta, training=True)
    x = functional.linear(functional.relu(x).flatten(1), weights[1], bias)
    return functional.cross_entropy(x, y)


@pytest.mark.parametrize(
    "settings",
    [
        *({"forget_by": part, "discount": 0.0} for part in (0.0, 0.3, 0.5, 1.0)),
        *({"discount": part} for part in (0.5, 1.0)),
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items() if value),
)
@pytest.mark.parametrize("sparsity", [0.8, 0.96])
def test_every_update_equals_the_reference(settings, sparsity):
    batches = make_batches("conv", STEPS)
    plain = build("conv")
    expected = []
    twin.train(
        [plain[0].weight, plain[4].weight],
        [plain[1].weight, plain[1].bias, plain[4].bias],
        conv_network,
        batches,
        sparsity=sparsity,
        lr=0.1,
        total=STEPS,
        **settings,
        seen=expected.append,
    )
    model, optimizer, sparsifier = begin("conv", sparsity=sparsity, **settings)
    for batch, now in zip(batches, expected, strict=True):
        step(model, optimizer, batch)
        for (_, weight), by_hand in zip(parts(sparsifier), now, strict=True):
            torch.testing.assert_close(weight.double(), by_hand, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("forget_by", [0.25, 0.5])
def test_initial_values_fade_and_are_then_discarded(forget_by):
    model, optimizer, sparsifier = begin("conv", forget_by=forget_by)
    for count, batch in enumerate(make_batches("conv", STEPS - 1), 1):
        step(model, optimizer, batch)
        forgotten = sparsifier.metrics()["forgotten"]
        assert forgotten == pytest.approx(min(1, count / STEPS / forget_by))
        assert all((mask.initial is None) == (forgotten == 1) for mask, _ in parts(sparsifier))
    assert forgotten == 1


def test_a_long_training_fades_every_few_updates():
    model, optimizer, sparsifier = begin("conv", forget_by=0.50001, total_steps=10_000)
    batch = make_batches("conv", 1)[0]
    for count in range(1, 10):
        step(model, optimizer, batch)
        expected = count // 4 * 4 / 5000.1  # 1,250 times: every fourth update
        assert sparsifier.metrics()["forgotten"] == pytest.approx(expected)
    sparsifier.load_state_dict(sparsifier.state_dict() | {"step": 4999})
    for expected in (0.99998, 1.0):
        step(model, optimizer, batch)
        assert sparsifier.metrics()["forgotten"] == pytest.approx(expected, abs=1e-5)
    assert all(mask.initial is None for mask, _ in parts(sparsifier))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_without_gradients_initial_values_fade_to_zero(decay, dtype):
    """Weight decay reduces them too; half precision would lose small changes."""
    model = build("conv").to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
    method = probmask.TiedProbMask(sparsity=0.8, forget_by=0.5)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=2000)
    start = [weight.detach().clone().float() for _, weight in parts(sparsifier)]
    for count in range(1, 1001):
        for _, weight in parts(sparsifier):
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        if count in (250, 1000):
            left = 1 - count / 1000
            for (_, weight), given in zip(parts(sparsifier), start, strict=True):
                part = (weight.float() * given).sum() / given.square().sum()
                assert -0.005 < part < left + 0.03
                assert decay or part > left - 0.03


@pytest.mark.parametrize("handed_over", [False, True])
def test_only_trained_weights_fade(handed_over):
    model = build("conv")
    model[0].weight.requires_grad_(False)
    given = model[0].weight.clone()
    rest = [p for p in model.parameters() if p.requires_grad or handed_over]
    optimizer = torch.optim.SGD(rest, lr=0.1)
    method = probmask.TiedProbMask(sparsity=0.8, forget_by=0.5, choose_at=1, freeze_at=1)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS)
    train(model, optimizer, make_batches("conv", STEPS - 1))
    (_, first), (_, second) = parts(sparsifier)
    assert torch.equal(first, given)
    assert sparsifier.metrics()["forgotten"] == 1
    assert not torch.equal(second, given)


@pytest.mark.parametrize("settings", [{}, {"discount": 1.0}], ids=["fading", "discounting"])
@pytest.mark.parametrize("stop", [1, 4, 9, 10, 12])
def test_resuming_is_bit_identical(stop, settings):
    batches = make_batches("conv", STEPS)
    whole = begin("conv", **settings)
    train(*whole[:2], batches)
    first = begin("conv", **settings)
    train(*first[:2], batches[:stop])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = begin("conv", model=build("conv", seed=9), **settings)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*second[:2], batches[stop:])
    assert_same_state(state_of(whole[0]), state_of(second[0]))


def test_the_default_fades_only_fresh_networks():
    def forget_by(model, name="conv", **settings):
        model, optimizer, sparsifier = begin(model=model, discount=None, **settings)
        train(model, optimizer, make_batches(name, 1))
        return sparsifier._masker.forget_by

    assert forget_by(build("conv")) == 0.5
    assert forget_by(build("mlp"), "mlp") == 0  # without BatchNorm the magnitudes matter
    seen = build("conv")
    seen(make_batches("conv", 1)[0][0])
    assert forget_by(copy.deepcopy(seen)) == 0  # its weights may be trained
    assert forget_by(copy.deepcopy(seen), forget_by=0.25) == 0.25
    seen[1].reset_running_stats()
    with torch.no_grad():
        seen[1].weight[0] += 0.1
    assert forget_by(seen) == 0  # the gain is left from an earlier training
    assert forget_by(build("mlp"), "mlp", forget_by=1) == 1
    assert forget_by(build("conv"), forget_by=0) == 0
    neck = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.BatchNorm1d(6), nn.Linear(6, 3))
    assert forget_by(neck, "mlp") == 0  # the layers before the new BatchNorm may be pretrained
    untracked = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
    )
    assert forget_by(untracked, "mlp") == 0


@pytest.mark.parametrize(
    ("kind", "expected"), [(torch.optim.SGD, 0.5), (torch.optim.AdamW, 0), (torch.optim.Adam, 0)]
)
def test_the_default_discounts_instead_of_fading_with_adam(kind, expected):
    model = build("conv")
    optimizer = kind(model.parameters(), lr=1e-3)
    method = probmask.TiedProbMask(sparsity=0.8)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS)
    train(model, optimizer, make_batches("conv", 1))
    assert sparsifier._masker.forget_by == expected
    assert sparsifier._masker.discount == (0 if expected else 1)


@pytest.mark.parametrize(("discount", "power"), [(0.4, 1.0), (1.0, 1.0), (1.0, 20.0)])
def test_the_discount_follows_the_present_sparsity_and_ends_with_the_choice(discount, power):
    settings = {"discount": discount, "discount_power": power}
    model, optimizer, sparsifier = begin("conv", sparsity=0.8, **settings)
    start = [weight.detach().clone() for _, weight in parts(sparsifier)]
    for count, batch in enumerate(make_batches("conv", STEPS - 1), 1):
        step(model, optimizer, batch)
        sparsity = sparsifier.metrics()["expected_sparsity"]
        for (mask, _), given in zip(parts(sparsifier), start, strict=True):
            if count / STEPS < 0.9:  # choose_at
                assert torch.equal(mask.initial, given)
                assert float(mask.discount) == pytest.approx(discount * sparsity**power)
            else:
                assert mask.initial is None


def test_the_choice_does_not_change_the_network():
    """Discount and threshold are folded into the weights."""
    model, optimizer, sparsifier = begin("conv", sparsity=0.8, discount=1.0, total_steps=100)
    train(model, optimizer, make_batches("conv", 89))
    optimizer.param_groups[0]["lr"] = 0.0
    model.eval()
    batch = make_batches("conv", 1)[0]
    before = model(batch[0])
    assert all(mask.initial is not None for mask, _ in parts(sparsifier))
    loss_of(model, batch).backward()
    optimizer.step()
    assert all(mask.initial is None for mask, _ in parts(sparsifier))
    torch.testing.assert_close(model(batch[0]), before, rtol=1e-4, atol=1e-5)


def test_the_decision_is_logged(caplog):
    caplog.set_level("INFO", "probmask")
    trained = build("conv")
    nn.init.uniform_(trained[1].weight)
    cases = (
        ("conv", build("conv"), "fades the initial values out"),
        ("conv", trained, "keeps the initial values up to high sparsity"),
        ("mlp", build("mlp"), "nothing shows whether they are random or pretrained"),
    )
    for name, model, message in cases:
        model, optimizer, _ = begin(model=model, discount=None)
        train(model, optimizer, make_batches(name, 1))
        assert message in caplog.messages[-1]
    assert len(caplog.messages) == len(cases)


class OwnNorm(nn.Module):
    """A normalization layer that is not one of PyTorch's, as in many transformers."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm, OwnNorm])
@pytest.mark.parametrize(("learned", "power"), [(0, 1), (1, 1), (2, 20), (3, 20)])
def test_pretrained_initial_values_are_recognized(norm, learned, power):
    """Where gains differ between channels in most normalization layers, whatever the optimizer."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(6, 6), norm(6), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    method = probmask.TiedProbMask(sparsity=0.8)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=STEPS)
    for layer in layers[1 : 3 * learned : 3]:  # a checkpoint may also be loaded after attach
        nn.init.uniform_(layer.weight)
    train(model, optimizer, make_batches("mlp", 1))
    assert sparsifier._masker.forget_by == 0
    assert (sparsifier._masker.discount, sparsifier._masker.discount_power) == (1, power)


def test_initial_values_are_pretrained_if_the_caller_says_so():
    model = build("mlp")
    optimizer = sgd(model)
    probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.8),
        optimizer=optimizer,
        total_steps=STEPS,
        pretrained=True,
    )
    train(model, optimizer, make_batches("mlp", STEPS))
    explicit = begin(model=build("mlp"), sparsity=0.8, discount=1.0, discount_power=20.0)
    train(*explicit[:2], make_batches("mlp", STEPS))
    assert_same_state(state_of(explicit[0]), state_of(model))


@pytest.mark.parametrize("loaded", [False, True])
def test_many_batches_in_one_update_do_not_count_as_training(loaded):
    model, optimizer, sparsifier = begin("conv")
    batches = make_batches("conv", 100)
    if loaded:
        other = build("conv", seed=1)
        for inputs, _ in batches + batches:
            other(inputs)
        model[1].load_state_dict(other[1].state_dict())
    for batch in batches:
        loss_of(model, batch).backward()
    optimizer.step()
    assert sparsifier._masker.forget_by == (0 if loaded else 0.5)


def test_weights_loaded_after_attach_do_not_fade():
    trained = build("conv")
    for batch in make_batches("conv", 70):
        trained(batch[0])
    model = build("conv", seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier = probmask.attach(
        model, probmask.TiedProbMask(sparsity=0.8), optimizer=optimizer, total_steps=STEPS
    )
    model[1].load_state_dict(trained[1].state_dict())
    train(model, optimizer, make_batches("conv", 1))
    assert sparsifier._masker.forget_by == 0


def test_a_repeated_closure_does_not_change_the_initial_values():
    model = build("conv")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparsifier = probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.8, forget_by=0.5),
        optimizer=optimizer,
        total_steps=STEPS,
    )
    given = [weight.clone() for _, weight in parts(sparsifier)]
    batch = make_batches("conv", 1)[0]
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) > 1
    for (mask, _), start in zip(parts(sparsifier), given, strict=True):
        assert torch.equal(mask.initial, start)


@pytest.mark.parametrize("after", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("before", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"forget_by": 0.9}, {"discount": 1.0}], ids=str)
def test_precision_may_change(settings, before, after):
    model, optimizer, sparsifier = begin("conv", sparsity=0.8, **settings)
    model.to(before)
    batches = make_batches("conv", 6)
    train(model, optimizer, [(x.to(before), y) for x, y in batches[:3]])
    model.to(after)
    train(model, optimizer, [(x.to(after), y) for x, y in batches[3:]])
    again, _, resumed = begin("conv", sparsity=0.8, **settings)
    again.to(after)
    resumed.load_state_dict(sparsifier.state_dict())
    for (mask, weight), (same, _) in zip(parts(sparsifier), parts(resumed), strict=True):
        assert weight.dtype == after
        assert weight.isfinite().all()
        # Not rounded to the weights' precision, so that a resumed run has the same values.
        assert mask.initial.dtype == same.initial.dtype == before
        assert torch.equal(mask.initial, same.initial)
