"""One network per update: tied weights, repeated calls, accumulation, checkpointing, bf16."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import probmask
from reference.networks import (
    assert_same_state,
    build,
    loss_of,
    make_batches,
    probs_of,
    sgd,
    state_of,
    step,
    train,
)
from reference.probmask_run import method_of
from reference.probmask_tied import tempered

STEPS = 10


def attached(name, steps=0, seed=1, include=(), form="tied", **settings):
    # Frozen halfway, so that ten updates cover the time before and after the freeze.
    settings = {"sparsity": 0.7, "min_keep_per_layer": 1, "freeze_at": 0.6} | settings
    model = build(name)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        method_of(form, **settings),
        optimizer=optimizer,
        total_steps=STEPS,
        seed=seed,
        include=include,
    )
    train(model, optimizer, make_batches(name, steps))
    optimizer.zero_grad()
    return model, optimizer, sparsifier


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Tied weights


def test_tied_linear_layers_are_masked_once_and_counted_once(form):
    model, optimizer, sparsifier = attached("tied", form=form, steps=5)
    assert [site.name for site in sparsifier.sites] == [
        "first.weight",
        "left.weight",
        "head.weight",
    ]
    assert torch.equal(model.left.weight, model.right.weight)
    model.eval()
    assert torch.equal(model.left.weight, model.right.weight)
    summary = sparsifier.finalize()
    size = 6 * 8 + 8 * 8 + 8 * 3
    assert (summary.size, summary.kept) == (size, size - round(0.7 * size))
    assert model.left.weight is model.right.weight
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_a_tied_weight_gets_the_gradient_of_both_uses(form):
    model, _, _ = attached("tied", form=form, steps=2)
    batch = make_batches("tied", 1)[0]
    left, original = model.left._masked_weights["weight"], model.left._parameters["weight"]
    slope = 1.0  # straight through, except for a relaxed mask
    if form == "learned":
        slope = left.training_weight(torch.ones_like(original)).detach()
    loss_of(model, batch).backward()
    together = original.grad.clone()

    # The same network with plain weights: the masked tensor twice, as two leaves.
    plain = build("tied")
    plain.right = nn.Linear(8, 8)
    with torch.no_grad():
        for name in ("first", "left", "right", "head"):
            getattr(plain, name).weight.copy_(getattr(model, name).weight)
            getattr(plain, name).bias.copy_(getattr(model, name).bias)
    loss_of(plain, batch).backward()
    uses = [plain.left.weight.grad * slope, plain.right.weight.grad * slope]
    if form == "tied":  # gradients of pruned weights are bounded separately for each use
        assert left.active.any()
        uses = [tempered(use, left.active, 1.0) for use in uses]
    expected = sum(uses)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=1e-7)


def test_a_head_tied_to_an_embedding_is_an_embedding(form):
    model, _, sparsifier = attached("language", form=form, steps=2)
    assert [site.name for site in sparsifier.sites] == ["mix.weight"]
    sparsifier.finalize()
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.count_nonzero() == 160


@pytest.mark.parametrize("pattern", ["embed", "head", "embed.weight", "head*"])
def test_a_tied_embedding_is_masked_on_request_under_any_of_its_names(form, pattern):
    model, _, sparsifier = attached("language", form=form, steps=3, include=[pattern])
    assert [site.size for site in sparsifier.sites] == [160, 64]
    assert torch.equal(model.head.weight, model.embed.weight)
    kept = sparsifier.finalize().kept
    assert kept == 224 - round(0.7 * 224)
    assert model.head.weight is model.embed.weight
    nonzero = model.embed.weight.count_nonzero() + model.mix.weight.count_nonzero()
    assert nonzero == kept


# Modules called twice, gradient accumulation, checkpointing


def test_a_module_called_twice_sees_one_mask(form):
    model, _, _ = attached("recurrent", form=form, steps=3)
    seen = []
    handle = model.again.register_forward_hook(
        lambda module, args, output: seen.append((args[0].detach(), output.detach()))
    )
    model(make_batches("recurrent", 1)[0][0])
    handle.remove()
    assert len(seen) == 3
    weight = model.again.weight
    for inputs, output in seen:
        expected = nn.functional.linear(inputs, weight, model.again.bias)
        assert torch.equal(output, expected)
    assert not torch.equal(weight, model.again._parameters["weight"])


def test_the_mask_changes_with_the_update_and_only_with_it():
    model, optimizer, _ = attached("mlp", form="learned", steps=3)
    batch = make_batches("mlp", 1)[0]
    first, second = model(batch[0]), model(batch[0])
    assert torch.equal(first, second)
    noise = model[0]._masked_weights["weight"].noise.clone()
    step(model, optimizer, batch)
    assert not torch.equal(noise, model[0]._masked_weights["weight"].noise)


@pytest.mark.parametrize(
    "settings",
    [{"outside": 0.0}, {"form": "learned"}, {"form": "learned", "draws": 2}],
    ids=str,
)
def test_two_half_batches_are_one_batch(settings):
    whole, whole_optimizer, whole_sparsifier = attached("mlp", **settings)
    parts, parts_optimizer, parts_sparsifier = attached("mlp", **settings)
    for inputs, labels in make_batches("mlp", 3):
        whole_optimizer.zero_grad()
        for share in whole_sparsifier.draws():
            (share * loss_of(whole, (inputs, labels))).backward()
        parts_optimizer.zero_grad()
        for half in (slice(0, 4), slice(4, 8)):
            for share in parts_sparsifier.draws():
                (share * loss_of(parts, (inputs[half], labels[half])) / 2).backward()
        expected = gradients(whole)
        for name, grad in gradients(parts).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)
        whole_optimizer.step()
        parts_optimizer.step()
        parts.load_state_dict(whole.state_dict())  # so that rounding errors do not accumulate
    assert parts_sparsifier.now.step == 3


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_blocks_gives_the_same_gradients(form, reentrant, frozen):
    model, _, _ = attached("unet", form=form, steps=8 if frozen else 3)
    inputs, labels = make_batches("unet", 1)[0]
    inputs.requires_grad_()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    expected = gradients(model)
    model.zero_grad()
    skip = checkpoint(model.down, inputs, use_reentrant=reentrant)
    middle = checkpoint(model.middle, skip, use_reentrant=reentrant)
    up = checkpoint(model.up, middle, use_reentrant=reentrant)
    head = checkpoint(model.head, torch.cat([skip, up], 1), use_reentrant=reentrant)
    nn.functional.cross_entropy(head, labels).backward()
    assert_same_state(expected, gradients(model))


def test_checkpointing_the_whole_model_trains_the_same(form):
    plain, plain_optimizer, _ = attached("transformer", form=form)
    model, optimizer, _ = attached("transformer", form=form)
    for inputs, labels in make_batches("transformer", STEPS):
        step(plain, plain_optimizer, (inputs, labels))
        optimizer.zero_grad()
        output = checkpoint(model, inputs, use_reentrant=False)
        nn.functional.cross_entropy(output, labels).backward()
        optimizer.step()
    assert_same_state(state_of(plain), state_of(model))


# Precision


@pytest.mark.parametrize("name", ["unet", "transformer", "mlp", "lstm"])
def test_bf16_autocast(form, name):
    model, optimizer, sparsifier = attached(name, form=form)
    for batch in make_batches(name, STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(batch[0]).dtype == torch.bfloat16
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        for parameter in model.parameters():
            assert parameter.dtype == torch.float32
            assert parameter.isfinite().all()
    assert sparsifier.finalize().kept == sum(s.size for s in sparsifier.sites) - round(
        0.7 * sum(s.size for s in sparsifier.sites)
    )


def test_the_mask_is_fp32_under_autocast(form):
    model, _, _ = attached("mlp", form=form, steps=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = model[0].weight
    assert inside.dtype == torch.float32
    assert torch.equal(inside, model[0].weight)


def test_a_bf16_model_keeps_its_probabilities_in_fp32_to_the_last_bit():
    model, _, sparsifier = attached("mlp", form="learned", steps=4)
    before = {name: prob.detach().clone() for name, prob in probs_of(model).items()}
    site = model[0]._masked_weights["weight"]
    noise, temperature = site.noise.clone(), site.temperature.clone()
    model.to(torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].bias.dtype == torch.bfloat16
    assert {prob.dtype for prob in probs_of(model).values()} == {torch.float32}
    assert_same_state(before, probs_of(model))
    assert torch.equal(site.noise, noise)
    assert torch.equal(site.temperature, temperature)
    assert sparsifier.now.step == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("first", ["convert", "attach"])
def test_training_in_another_precision(form, dtype, first):
    model = build("mlp")
    if first == "convert":
        model.to(dtype)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        method_of(form, sparsity=0.8, min_keep_per_layer=1),
        optimizer=optimizer,
        total_steps=STEPS,
    )
    model.to(dtype)
    for inputs, labels in make_batches("mlp", STEPS):
        step(model, optimizer, (inputs.to(dtype), labels))
    model.eval()
    assert sum(int(model[i].weight.count_nonzero()) for i in (0, 2, 4)) == 80
    assert sparsifier.finalize().kept == 80
    assert model[0].weight.dtype == dtype


def test_converting_by_type(form):
    model, _, sparsifier = attached("mlp", form=form, steps=2)
    model.type(torch.float64)
    assert sparsifier.finalize().kept == 120
    assert model[0].weight.dtype == torch.float64


# Training and evaluation


@pytest.mark.parametrize("steps", [0, 4, 9])
@pytest.mark.parametrize("name", ["unet", "mlp", "tied", "transformer"])
def test_evaluation_uses_exactly_the_budget(form, name, steps):
    model, _, sparsifier = attached(name, form=form, steps=steps)
    keep = sparsifier.summary().kept
    size = sum(site.size for site in sparsifier.sites)
    assert keep == size - round(0.7 * size)
    model.eval()
    in_use = [getattr(*site.holders[0]) for site in sparsifier.sites]
    assert sum(int(weight.count_nonzero()) for weight in in_use) == keep
    in_use = [weight.detach().clone() for weight in in_use]
    sparsifier.finalize()
    for weight, site in zip(in_use, sparsifier.sites, strict=True):
        assert torch.equal(weight, site.weight)


@pytest.mark.parametrize("steps", [0, 4, 9])
@pytest.mark.parametrize("name", ["unet", "tied"])
def test_learned_probabilities_do_not_change_the_kept_weights(name, steps):
    model, _, sparsifier = attached(name, form="learned", steps=steps)
    model.eval()
    for site in sparsifier.sites:
        weight = getattr(*site.holders[0])
        assert torch.equal(weight, torch.where(weight != 0, site.weight, 0.0))


def test_train_after_eval_restores_the_training_network(form):
    model, _, _ = attached("mlp", form=form, steps=2)
    soft = model[0].weight.clone()
    hard = model.eval()[0].weight.clone()
    assert not torch.equal(soft, hard)
    assert torch.equal(model.train()[0].weight, soft)


def test_a_module_in_evaluation_mode_follows_training(form):
    """A module that stays in evaluation mode (next to a frozen BatchNorm) has current masks."""
    model, optimizer, sparsifier = attached("mlp", form=form)
    model[2].eval()
    for batch in make_batches("mlp", STEPS):
        step(model, optimizer, batch)
        keep = dict(zip(["0", "2", "4"], sparsifier.summary().layers, strict=True))["2"].kept
        assert int(model[2].weight.count_nonzero()) == keep


def test_the_fused_attention_of_evaluation_sees_the_hard_mask(form):
    model, _, sparsifier = attached("transformer", form=form, steps=4)
    inputs = make_batches("transformer", 1)[0][0]
    model.eval()
    slow = model(inputs)  # gradients are on: no fused path
    with torch.no_grad():
        fused = model(inputs)
    torch.testing.assert_close(fused, slow, rtol=1e-4, atol=1e-5)
    sparsifier.finalize()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), fused, rtol=1e-4, atol=1e-5)


def test_finalize_does_not_change_the_outputs_of_evaluation(form):
    for name in ("unet", "mlp", "tied", "transformer"):
        model, _, sparsifier = attached(name, form=form, steps=6)
        inputs = make_batches(name, 1)[0][0]
        expected = model.eval()(inputs)
        sparsifier.finalize()
        assert torch.equal(model(inputs), expected)


def test_a_pruned_infinite_weight_becomes_zero(form):
    """0 times infinity is NaN: the hard mask must select, not multiply."""
    model, _, sparsifier = attached("mlp", form=form, steps=8)
    hard = model[0]._masked_weights["weight"].mask
    with torch.no_grad():
        model[0]._parameters["weight"][~hard] = -torch.inf
    assert (model.eval()[0].weight[~hard] == 0).all()
    sparsifier.finalize()
    assert model[0].weight.isfinite().all()
    assert not torch.signbit(model[0].weight[~hard]).any()


# Pruned weights stay pruned


@pytest.mark.parametrize("settings", [{}, {"nesterov": True}, {"weight_decay": 0.5, "lr": 0.05}])
def test_momentum_and_weight_decay_do_not_revive_pruned_weights(form, settings):
    model = build("unet")
    optimizer = sgd(model, **settings)
    sparsifier = probmask.attach(
        model,
        method_of(form, sparsity=0.9, ramp_end=0.25, freeze_at=0.3, min_keep_per_layer=2),
        optimizer=optimizer,
        total_steps=20,
        seed=1,
    )
    batches = make_batches("unet", 20)
    train(model, optimizer, batches[:7])
    frozen = [getattr(*site.holders[0]).detach() == 0 for site in sparsifier.sites]
    size = sum(site.size for site in sparsifier.sites)
    assert sum(int(zero.sum()) for zero in frozen) == round(0.9 * size)
    for batch in batches[7:]:
        step(model, optimizer, batch)
        for zero, site in zip(frozen, sparsifier.sites, strict=True):
            weight = getattr(*site.holders[0])
            assert torch.equal(weight == 0, zero)
            assert not torch.signbit(weight[zero]).any()
            grad = site.weight.grad
            assert (grad[zero] == 0).all()
    sparsifier.finalize()
    for zero, site in zip(frozen, sparsifier.sites, strict=True):
        assert torch.equal(site.weight == 0, zero)
        assert not torch.signbit(site.weight[zero]).any()


def test_probabilities_do_not_change_after_the_freeze():
    model, optimizer, _ = attached("mlp", form="learned", steps=8)
    before = {name: prob.detach().clone() for name, prob in probs_of(model).items()}
    train(model, optimizer, make_batches("mlp", 3, seed=8))
    assert_same_state(before, probs_of(model))


# Order in memory


def test_channels_last_weights_keep_their_layout(form):
    layer = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(layer)
    optimizer = sgd(model)
    method = method_of(form, sparsity=0.5, freeze_at=0.5)
    probmask.attach(model, method, optimizer=optimizer, total_steps=4, seed=0)
    images = torch.randn(2, 4, 6, 6)
    for training in (True, False):
        model.train(training)
        assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
