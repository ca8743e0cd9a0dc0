"""Sparse variational dropout: its divergence, its noise on outputs, its hooks."""

import copy
import math

import pytest
import torch
from torch import nn

import probmask
from probmask import InputError
from probmask.methods.sparse_vd import SparseVD, kl_divergence, log_alpha
from reference.networks import loss_of
from reference.sparse_training import SparseTraining, assert_exact_budget


def pairs_of(training):
    """Return masked weight and weight of each site."""
    return list(zip(training.masker.masked, training.masker.weights, strict=True))


@pytest.mark.parametrize("value", [-7.0, -3.0, -1.0, 0.0, 1.0, 3.0, 7.0])
def test_the_divergence_against_a_numerical_integral(value):
    # KL = E ln|e| - ln(v)/2 + const over e ~ N(1, v), the constant such that it vanishes at v = ∞.
    deviation = math.exp(value / 2)
    z = torch.linspace(-9, 9, 4_000_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    spacing = float(z[1] - z[0])
    noisy = (1 + deviation * z).abs().clamp(min=spacing * deviation / 4).log()
    euler = 0.5772156649015329
    exact = float((density * noisy).sum()) * spacing - value / 2 + (euler + math.log(2)) / 2
    approximate = float(kl_divergence(torch.tensor(value, dtype=torch.float64)))
    assert approximate == pytest.approx(exact, abs=0.02)


def test_the_noise_ratio_is_clipped():
    weight = torch.tensor([0.0, 1e-6, 0.1, 1000.0])
    found = log_alpha(weight, torch.full((4,), -3.0)).tolist()
    assert found[0] == found[1] == 8
    assert found[2] == pytest.approx(-3 - 2 * math.log(0.1), abs=1e-4)
    assert found[3] == -8


LAYERS = {
    "linear": (nn.Linear(5, 3), (2, 5)),
    "convolution": (nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2), (2, 4, 5, 5)),
    "circular": (nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 7)),
    "transposed": (nn.ConvTranspose2d(2, 3, 2), (1, 2, 3, 3)),  # noise on its weights
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_are_distributed_as_those_of_noisy_weights(name):
    layer, shape = copy.deepcopy(LAYERS[name])
    sparsifier = probmask.attach(layer, SparseVD(sparsity=0.5), total_steps=10**6, seed=1)
    masked = sparsifier._masker.masked[0]
    masked.gate.data.fill_(-3.0)
    original = sparsifier._masker.weights[0].data  # large enough that no ratio is clipped
    original.copy_(torch.where(original < 0, -0.1, 0.1) + original)
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    samples = []
    for step in range(1000):
        sparsifier._step = step
        sparsifier._prepare(0)
        samples.append(layer(inputs).detach())
    outputs = torch.stack(samples)
    weight = sparsifier._masker.weights[0].detach().clone()
    sparsifier.finalize()
    generator = torch.Generator().manual_seed(2)
    drawn = []
    with torch.no_grad():
        for _ in range(1000):
            noise = torch.randn(weight.shape, generator=generator)
            layer.weight.copy_(weight + math.exp(-1.5) * noise)
            drawn.append(layer(inputs))
    twin = torch.stack(drawn)
    assert torch.allclose(outputs.std(0), twin.std(0), rtol=0.15)
    assert (outputs.mean(0) - twin.mean(0)).abs().max() < 0.2 * twin.std(0).max()


def test_the_penalty_warms_up_to_its_formula():
    method = SparseVD(
        sparsity=0.8, strength=2.0, steer=False, freeze_at=None, warm_begin=0.25, warm_end=0.75
    )
    training = SparseTraining(method, "mlp", steps=8)
    seen = []
    for done in range(8):
        seen.append(training.masker.warmth)
        training.go(done + 1)
    assert seen == pytest.approx([0, 0, 0, 0.25, 0.5, 0.75, 1, 1])
    pairs = pairs_of(training)
    values = torch.cat(
        [kl_divergence(log_alpha(w.detach(), m.gate.detach())).flatten() for m, w in pairs]
    )
    assert training.sparsifier.penalty().item() == pytest.approx(2.0 * float(values.mean()))


def test_the_divergence_can_start_without_warm_up():
    training = SparseTraining(SparseVD(sparsity=0.8, warm_begin=0, warm_end=0), "mlp")
    training.go(1)
    assert training.masker.warmth == 1


def test_noise_and_weights_are_trained_through_the_output():
    training = SparseTraining(SparseVD(sparsity=0.8), "conv")
    loss_of(training.model, training.batches[0]).backward()
    for masked, weight in pairs_of(training):
        assert masked.local
        assert masked.gate.grad.any()
        assert weight.grad.any()


def test_attention_gets_noise_on_its_weights():
    training = SparseTraining(SparseVD(sparsity=0.8), "transformer")
    local = {n: m.local for n, m in zip(training.masker.names, training.masker.masked, strict=True)}
    assert not local["encoder.layers.0.self_attn.in_proj_weight"]
    assert not local["encoder.layers.0.self_attn.out_proj.weight"]
    assert local["encoder.layers.0.linear1.weight"]
    training.gradients(training.batches[0])
    assert all(masked.gate.grad.any() for masked in training.masker.masked)


def test_a_repeated_pass_has_the_same_noise_and_evaluation_none():
    training = SparseTraining(SparseVD(sparsity=0.01), "conv")
    for masked in training.masker.masked:
        masked.gate.data.fill_(-2.0)
    inputs = training.batches[0][0]
    first, second = training.model(inputs), training.model(inputs)
    assert torch.equal(first, second)
    twin = copy.deepcopy(training.model)
    assert torch.equal(twin(inputs), training.model(inputs))
    training.sparsifier._step = 1
    training.sparsifier._prepare(0)
    assert not torch.equal(first, training.model(inputs))
    weights = [weight.detach() for weight in training.masker.weights]
    training.model.eval()
    for module, weight in zip((training.model[0], training.model[4]), weights, strict=True):
        kept = module.weight != 0
        assert (~kept).sum() <= 5
        assert torch.equal(module.weight[kept], weight[kept])


def test_called_by_keyword():
    layer = nn.Linear(4, 3)
    sparsifier = probmask.attach(layer, SparseVD(sparsity=0.5), total_steps=4, seed=1)
    inputs = torch.randn(2, 4)
    assert torch.equal(layer(input=inputs), layer(inputs))
    sparsifier.finalize()
    assert not layer._forward_hooks


def test_steering_raises_the_divergence_while_too_much_is_kept():
    training = SparseTraining(SparseVD(sparsity=0.8), steps=60).go(40)
    assert training.masker.pressure > 1
    assert training.masker.knob > 1


def test_the_least_noisy_weights_are_kept():
    training = SparseTraining(SparseVD(sparsity=0.8, freeze_at=None), steps=60).go()
    noise = torch.cat(
        [log_alpha(w.detach(), m.gate.detach()).flatten() for m, w in pairs_of(training)]
    )
    training.sparsifier.summary()
    hard = torch.cat([masked.mask.flatten() for masked in training.masker.masked])
    assert noise[hard].max() <= noise[~hard].min()


@pytest.mark.parametrize("network", ["depthwise", "unet", "transformer", "tied", "recurrent"])
def test_the_budget_is_exact(network):
    assert_exact_budget(SparseVD(sparsity=0.85), network)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": -1}, r"SparseVD\(strength=-1\)"),
        ({"threshold": 9}, r"SparseVD\(threshold=9\)"),
        ({"warm_begin": 0.5, "warm_end": 0.1}, "the values must not decrease"),
        ({"warm_end": 1.5}, r"SparseVD\(warm_end=1.5\)"),
    ],
)
def test_invalid_settings_raise(settings, message):
    with pytest.raises(InputError, match=message):
        SparseVD(sparsity=0.9, **settings)
