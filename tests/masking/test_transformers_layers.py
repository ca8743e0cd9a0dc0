"""`Conv1D` of transformers, whose weight is stored as (in, out), and the tied weights of GPT-2."""

import math

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import probmask
from probmask.masking.macs import macs_per_weight
from probmask.masking.sites import find_sites
from probmask.methods import METHODS
from probmask.methods.families.gates import output_shape
from probmask.methods.families.kaiming import fan_in, kaiming_normal_
from reference.networks import make_batches, mlp, sgd, train

STEPS = 12


class WithConv1D(nn.Module):
    """The network `mlp` with its linear layers replaced by `Conv1D`."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        for index in (0, 2, 4):
            linear = self.layers[index]
            layer = Conv1D(linear.out_features, linear.in_features)
            layer.weight.data.copy_(linear.weight.T)
            layer.bias.data.copy_(linear.bias)
            self.layers[index] = layer

    def forward(self, x):
        return self.layers(x)


def tiny_gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config)


# Methods without noise, so that the transposed network has the same training.
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("probmask-tied", {}),
        ("gmp", {}),
        ("st3", {}),
        ("feather", {}),
        ("mlprune", {"labels": "given"}),
        ("snip", {}),
        ("grasp", {}),
    ],
)
def test_training_equals_that_of_linear_layers(name, settings):
    """Channels, K-FAC factors and layer shares are those of the transposed weight."""
    finished = []
    for build in (mlp, WithConv1D):
        torch.manual_seed(0)
        model = build().double()
        optimizer = sgd(model, lr=0.02)
        batches = [(x.double(), y) for x, y in make_batches("mlp", STEPS)]
        sparsifier = probmask.attach(
            model,
            METHODS[name](sparsity=0.8, **settings),
            optimizer=optimizer,
            total_steps=STEPS,
            steps_per_epoch=4,
            probe=probmask.Probe(batches[:4]),
            seed=1,
        )
        train(model, optimizer, batches)
        assert sparsifier.finalize().kept == 80
        finished.append(model if build is mlp else model.layers)
    for index in (0, 2, 4):
        linear, layer = (model[index] for model in finished)
        torch.testing.assert_close(layer.weight, linear.weight.T, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.bias, linear.bias, rtol=1e-9, atol=1e-9)


def test_its_inputs_are_in_the_first_dimension():
    layer = Conv1D(300, 20)  # 20 inputs, 300 outputs
    (site,) = find_sites(layer)
    assert site.output_axis == 1
    assert output_shape(site) == (1, 300)
    assert fan_in(site) == 20
    with torch.no_grad():
        kaiming_normal_([site], seed=1)
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / 20), rel=0.05)
    assert macs_per_weight(layer, [site], torch.randn(4, 7, 20)) == (7,)


def test_gpt2_is_masked_except_for_its_embeddings():
    """The head is tied to the token embedding, so both stay dense."""
    model = tiny_gpt2()
    expected = [
        f"transformer.h.{block}.{layer}.weight"
        for block in (0, 1)
        for layer in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert [site.name for site in find_sites(model)] == expected
    tied = find_sites(model, include=["lm_head"])
    assert [site.name for site in tied] == ["transformer.wte.weight", *expected]
    assert len(tied[0].holders) == 2


@pytest.mark.parametrize("include", [(), ("lm_head",)])
def test_gpt2_trains_finalizes_saves_and_loads(include, tmp_path):
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    method = probmask.TiedProbMask(sparsity=0.9)
    with pytest.warns(probmask.UnmaskedWeightsWarning, match="wpe") as caught:
        sparsifier = probmask.attach(
            model, method, optimizer=optimizer, total_steps=STEPS, include=include
        )
    assert ("wte" in str(caught[0].message)) == (not include)
    tokens = torch.randint(30, (4, 8), generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    summary = sparsifier.finalize()
    size = 2 * (8 * 24 + 8 * 8 + 8 * 32 + 32 * 8) + (30 * 8 if include else 0)
    assert (summary.size, summary.kept) == (size, size - round(0.9 * size))
    assert model.lm_head.weight is model.transformer.wte.weight
    probmask.save(model.eval(), tmp_path / "gpt2.safetensors")
    loaded = probmask.load_into(tiny_gpt2(), tmp_path / "gpt2.safetensors").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
