"""MLPrune: its factors, its costs against an explicit Fisher matrix, and the pruning."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from probmask.core.kronecker import inverse_diagonal, obs_importance
from probmask.methods.families.stored import active_masks
from probmask.methods.mlprune import (
    MLPrune,
    gradient_vectors,
    importances,
    input_vectors,
    log_histogram,
    sample_labels,
)
from reference.networks import assert_same_state, build, make_batches, sgd, state_of, train

STEPS, PER_EPOCH, PRUNED_AT = 10, 2, 8


def begin(name="mlp", model=None, sparsity=0.8, probe=None, seed=0, total_steps=STEPS, **settings):
    model = build(name) if model is None else model
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        MLPrune(sparsity=sparsity, **settings),
        optimizer=optimizer,
        total_steps=total_steps,
        steps_per_epoch=PER_EPOCH,
        probe=probe or probmask.Probe(make_batches(name, 3, seed=5)),
        seed=seed,
    )
    return model, optimizer, sparsifier


def cross_entropy_of(outputs, targets, _):
    return functional.cross_entropy(outputs, targets, reduction="sum")


def measured(module, weight, batches, loss=cross_entropy_of, damping=1e-6, model=None):
    model = module if model is None else model
    return importances(model, [weight], [[(module, "weight")]], batches, loss, damping=damping)[0]


# The criterion


def test_the_cost_is_that_of_an_explicit_inverse_fisher():
    torch.manual_seed(0)
    W = torch.randn(3, 4, dtype=torch.float64)
    G, A = ((lambda x: x @ x.T / 9)(torch.randn(n, 9, dtype=torch.float64)) for n in (3, 4))
    damped = [M + 0.01 * M.diagonal().mean() * torch.eye(len(M)) for M in (G, A)]
    fisher = torch.kron(*damped)  # in the row-major order of W
    explicit = W.flatten() ** 2 / (2 * torch.linalg.inv(fisher).diagonal())
    cost = obs_importance(W, G[None], A[None], damping=0.01)
    torch.testing.assert_close(cost.flatten(), explicit)


def test_the_measured_cost_is_that_of_the_explicit_fisher():
    """On one example, label by label: there the Fisher matrix is exactly a Kronecker product."""
    torch.manual_seed(0)
    layer = nn.Linear(2, 3, bias=False)
    x, labels = torch.randn(1, 2), torch.arange(3)
    probabilities = layer(x).softmax(1)[0].detach()

    def loss(outputs, _, label):  # so that the squared gradient has the weight p(label)
        return probabilities[label].sqrt() * functional.cross_entropy(outputs, labels[None, label])

    gradients = [torch.autograd.grad(loss(layer(x), None, y), layer.weight)[0] for y in labels]
    fisher = sum(torch.outer(g.flatten(), g.flatten()) for g in gradients) / 3  # of 3 batches
    g = (torch.eye(3) - probabilities) * probabilities.sqrt()[:, None]
    G, A = g.T @ g / 3, x.T @ x
    torch.testing.assert_close(torch.kron(G, A), fisher)
    damped = [M.double() + 0.1 * M.trace() / len(M) * torch.eye(len(M)) for M in (G, A)]
    inverse = torch.linalg.inv(torch.kron(*damped))
    explicit = layer.weight.detach().flatten() ** 2 / (2 * inverse.diagonal())
    cost = measured(layer, layer.weight, [(x, None)] * 3, loss, damping=0.1)
    torch.testing.assert_close(cost.flatten(), explicit, rtol=1e-5, atol=0)


def test_weights_without_inputs_cost_nothing():
    zeros = torch.zeros(1, 4, 4)
    assert torch.isfinite(inverse_diagonal(zeros, 1e-3)).all()
    cost = obs_importance(torch.ones(2, 4), torch.eye(2)[None], zeros, 1e-3)
    assert (cost < 1e-20).all()


LAYERS = {
    "linear": (nn.Linear(3, 4), (2, 3)),
    "tokens": (nn.Linear(3, 4), (2, 5, 3)),
    "conv1d": (nn.Conv1d(2, 3, 3, stride=2, dilation=2), (2, 2, 11)),
    "conv2d": (nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 2, 7, 6)),
    "same": (nn.Conv2d(2, 3, (3, 4), padding="same", dilation=2), (2, 2, 7, 6)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5)),
    "reflect": (nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), (2, 2, 5, 5)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 5, 5)),
    "depthwise": (nn.Conv2d(4, 8, 3, padding=1, groups=4), (2, 4, 5, 5)),
    "conv3d": (nn.Conv3d(2, 3, 2, padding=1), (2, 2, 3, 4, 3)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 3, 4)),
    "output padding": (nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 2, 4)),
    "more of it": (nn.ConvTranspose1d(2, 3, 3, dilation=2, output_padding=1), (2, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_vectors_make_up_the_gradient_of_the_weight(name):
    layer, shape = LAYERS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    output = layer(x)
    grad = torch.randn_like(output)
    (expected,) = torch.autograd.grad(output, layer.weight, grad)
    a, g = input_vectors(layer, x), gradient_vectors(layer, grad, x.shape[2:])
    rows, columns = (a, g) if isinstance(layer, nn.modules.conv._ConvTransposeNd) else (g, a)
    found = torch.einsum("ngi,ngj->gij", rows, columns).reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_groups_are_measured_separately():
    """The costs of a grouped convolution equal those of its groups as single convolutions."""
    torch.manual_seed(0)
    grouped = nn.Conv2d(4, 6, 3, groups=2, bias=False)
    x = torch.randn(40, 4, 5, 5)

    def half(outputs, _, __):
        return (outputs * torch.linspace(-1, 1, 9).view(3, 3)).square().sum()

    whole = measured(grouped, grouped.weight, [(x, None)], half, damping=1e-3)
    for group in range(2):
        alone = nn.Conv2d(2, 3, 3, bias=False)
        alone.weight.data = grouped.weight.data[3 * group : 3 * group + 3]
        part = x[:, 2 * group : 2 * group + 2]
        cost = measured(alone, alone.weight, [(part, None)], half, damping=1e-3)
        torch.testing.assert_close(whole[3 * group : 3 * group + 3], cost, rtol=1e-4, atol=1e-12)


def test_a_module_called_twice_counts_both_calls():
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    x, y = torch.randn(8, 3), torch.randn(8, 3)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, both):
            return torch.cat([self.layer(input=both[:, :3]), self.layer(both[:, 3:])], dim=1)

    def square(outputs, *_):
        return outputs.square().sum()

    twice = measured(layer, layer.weight, [(torch.cat([x, y], 1), None)], square, model=Twice())
    once = measured(layer, layer.weight, [(torch.cat([x, y]), None)], square)
    torch.testing.assert_close(twice, 2 * once)  # per example; positions are two instead of one


def test_labels_are_drawn_from_the_models_distribution():
    logits = torch.tensor([0.0, 1.0, -2.0]).repeat(20000, 1)
    labels = sample_labels(logits, 3, 0)
    found = functional.one_hot(labels, 3).double().mean(0)
    torch.testing.assert_close(found, logits[0].softmax(0).double(), atol=0.01, rtol=0)
    assert torch.equal(labels, sample_labels(logits, 3, 0))
    assert not torch.equal(labels, sample_labels(logits, 3, 1))
    assert sample_labels(torch.zeros(2, 3, 4, 4), 0, 0).shape == (2, 4, 4)


# The measurement


def test_attention_and_other_weights_take_the_diagonal():
    model, _, sparsifier = begin("transformer")
    masker = sparsifier._masker
    costs = dict(zip(masker.names, masker.costs(), strict=True))
    for cost in costs.values():
        assert (cost >= 0).all()
        assert cost.sum() == pytest.approx(1)
    name = "encoder.layers.0.self_attn.in_proj_weight"
    weight = dict(zip(masker.names, masker.weights, strict=True))[name].detach()
    squares = torch.zeros_like(weight)
    for index, (tokens, _) in enumerate(make_batches("transformer", 3, seed=5)):
        logits = copy.deepcopy(model).train()(tokens)  # it has neither dropout nor BatchNorm
        model.zero_grad()
        loss = functional.cross_entropy(
            model(tokens), sample_labels(logits.detach(), 0, index), reduction="sum"
        )
        attention = model.encoder.layers[0].self_attn._parameters["in_proj_weight"]
        squares += torch.autograd.grad(loss, attention)[0].square()
    expected = weight.square() * squares
    torch.testing.assert_close(costs[name].float(), expected / expected.sum(), rtol=1e-3, atol=1e-7)


def test_measuring_leaves_the_model_unchanged():
    model, optimizer, sparsifier = begin("conv")
    train(model, optimizer, make_batches("conv", 2))
    model[1].eval()
    state = state_of(model)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    one = sparsifier._masker.costs()
    assert_same_state(state, state_of(model))
    assert torch.equal(generator, torch.get_rng_state())
    assert [module.training for module in (model, model[0], model[1])] == [True, True, False]
    assert all(not module._forward_hooks for module in model.modules())
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)
    for first, second in zip(one, sparsifier._masker.costs(), strict=True):
        assert torch.equal(first, second)


def test_weights_that_are_not_trained_have_a_cost_too():
    model, _, sparsifier = begin()
    trained = sparsifier._masker.costs()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    for one, other in zip(trained, sparsifier._masker.costs(), strict=True):
        assert torch.equal(one, other)
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4


def test_a_convolution_of_a_single_example_without_a_batch_dimension():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(2, 3, 3), torch.randn(2, 5, 5)

    def square(outputs, *_):
        return outputs.square().sum()

    alone = measured(conv, conv.weight, [(x, None)], square)
    batched = measured(conv, conv.weight, [(x[None], None)], square)
    torch.testing.assert_close(alone * 2, batched)  # len(x) is taken for the number of examples


def test_hooks_are_removed_even_if_the_model_fails():
    model, _, sparsifier = begin(
        "conv", probe=probmask.Probe([(torch.zeros(2, 5), torch.zeros(2))])
    )
    with pytest.raises(RuntimeError):
        sparsifier._masker.costs()
    assert all(not module._forward_hooks for module in model.modules())
    assert model.training


def test_the_number_of_batches_measured():
    seen = []

    def batches():
        for batch in make_batches("mlp", 4, seed=5):
            seen.append(batch)
            yield batch

    class Again:
        def __iter__(self):
            return batches()

    for asked, count in ((1, 1), (3, 3), (None, 4), (9, 4)):
        seen.clear()
        _, _, sparsifier = begin(probe=probmask.Probe(Again()), probe_batches=asked)
        sparsifier._masker.costs()
        assert len(seen) == count


def test_given_labels_go_through_the_probes_own_loss():
    seen = []

    def criterion(outputs, targets):
        seen.append(len(targets))
        return functional.mse_loss(outputs, functional.one_hot(targets, 3).float())

    probe = probmask.Probe(make_batches("mlp", 2, seed=5), criterion)
    _, _, sparsifier = begin(probe=probe, labels="given")
    sparsifier._masker.costs()
    assert seen == [8, 8]


def test_without_normalization_costs_depend_on_the_curvature_of_layers():
    _, _, plain = begin(normalize=False)
    _, _, normalized = begin()
    for one, other in zip(plain._masker.costs(), normalized._masker.costs(), strict=True):
        assert float(one.sum()) != pytest.approx(1, abs=1e-3)
        torch.testing.assert_close(one / one.sum(), other)


# The pruning


def test_the_cheapest_weights_are_pruned_after_the_first_phase():
    model, optimizer, sparsifier = begin()
    twin, its_optimizer, its_sparsifier = begin(total_steps=2 * STEPS)  # prunes later
    train(model, optimizer, make_batches("mlp", PRUNED_AT))
    train(twin, its_optimizer, make_batches("mlp", PRUNED_AT))
    costs = torch.cat([cost.flatten() for cost in its_sparsifier._masker.costs()])
    active = torch.cat([mask.flatten() for mask in active_masks(sparsifier._masker.masked)])
    assert active.sum() == 80
    assert costs[active].min() >= costs[~active].max()
    assert sparsifier.frozen
    assert not optimizer.state


@pytest.mark.parametrize("name", ["depthwise", "conv", "conv3d", "conv1d", "unet", "language"])
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_budget_is_exact(name, scope):
    model, optimizer, sparsifier = begin(name, sparsity=0.873, scope=scope)
    train(model, optimizer, make_batches(name, STEPS))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.873 * summary.size)


@pytest.mark.parametrize("steps", [0, 3, PRUNED_AT])
def test_the_budget_is_exact_if_training_ends_early(steps):
    model, optimizer, sparsifier = begin("depthwise", sparsity=0.6, dense_first=True)
    train(model, optimizer, make_batches("depthwise", steps))
    summary = sparsifier.finalize()
    assert summary.kept == summary.size - round(0.6 * summary.size)
    assert summary.layers[0].kept == summary.layers[0].size


def test_sparsity_zero_is_dense_training_and_needs_no_data():
    model = build("conv")
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, MLPrune(sparsity=0), optimizer=optimizer, total_steps=STEPS)
    train(model, optimizer, make_batches("conv", STEPS))
    sparsifier.finalize()
    twin = build("conv")
    train(twin, sgd(twin), make_batches("conv", STEPS))
    assert_same_state(state_of(model), state_of(twin))


def test_a_copy_of_the_model_does_not_copy_the_data():
    probe = probmask.Probe(make_batches("mlp", 1))
    model, _, _ = begin(probe=probe)
    twin = copy.deepcopy(model)
    masker = twin[0]._masked_weights["weight"]._source
    assert masker._probe is probe
    assert masker.model is twin


def test_missing_data_raises():
    with pytest.raises(
        probmask.InputError, match=r"attach\(MLPrune\): this method needs data .*probe="
    ):
        probmask.attach(build("mlp"), MLPrune(sparsity=0.5), total_steps=4, steps_per_epoch=2)
    _, _, sparsifier = begin(probe=probmask.Probe([]))
    with pytest.raises(probmask.InputError, match=r"MLPrune: the probe contains no batch\."):
        sparsifier._masker.costs()


def test_outputs_other_than_logits_raise():
    model = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0))
    _, _, sparsifier = begin(model=model, probe=probmask.Probe(make_batches("mlp", 1)))
    with pytest.raises(probmask.InputError, match=r"must be logits, .* pass labels='given'\."):
        sparsifier._masker.costs()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scope": "std"}, r"MLPrune\(scope='std'\): must be one of 'global', 'layer'\."),
        (
            {"damping": 0},
            r"MLPrune\(damping=0\): must be a fraction of the diagonal, at least 1e-06\.",
        ),
        ({"labels": "true"}, r"MLPrune\(labels='true'\): must be one of 'sampled', 'given'\."),
        (
            {"probe_batches": 0},
            r"MLPrune\(probe_batches=0\): must be a number of batches, an integer of at least 1",
        ),
        ({"normalize": 1.5}, r"MLPrune\(normalize=1.5\): must be one of True, False\."),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(probmask.InputError, match=message):
        MLPrune(**{"sparsity": 0.9} | settings)


# Histograms


def test_costs_are_shown_layer_by_layer_in_the_epoch_of_the_pruning_only():
    model, optimizer, sparsifier = begin()
    batches = make_batches("mlp", STEPS)
    shown = []
    for batch in batches:
        train(model, optimizer, [batch])
        shown.append(sparsifier.histograms())
    assert [step for step, found in enumerate(shown, start=1) if found] == [PRUNED_AT]
    sizes = [layer.size for layer in sparsifier.finalize().layers]
    found = shown[PRUNED_AT - 1]
    assert all(name.startswith("log10_cost/") for name in found)
    assert [sum(histogram.counts) for histogram in found.values()] == sizes


def test_the_histogram_of_costs_counts_every_weight_in_its_decade():
    costs = torch.tensor([0.0, 1e-30, 1e-14, 1.1e-3, 1.2e-3, 0.5, 1e9])
    histogram = log_histogram(costs)
    width = (histogram.high - histogram.low) / len(histogram.counts)
    expected = [0] * len(histogram.counts)
    for cost in costs.tolist():
        log = math.log10(cost) if cost > 0 else histogram.low
        place = math.floor((min(max(log, histogram.low), histogram.high) - histogram.low) / width)
        expected[min(place, len(expected) - 1)] += 1
    assert list(histogram.counts) == expected
