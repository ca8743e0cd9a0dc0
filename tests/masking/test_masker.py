"""Custom methods written against the public API, as CONTRIBUTING describes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import probmask
from probmask.methods import (
    Context,
    MaskedWeight,
    Masker,
    Method,
    Progress,
    Site,
    Trainables,
    WeightOptimizers,
)
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


@dataclass(frozen=True, kw_only=True)
class Random(Method):
    """Keep a random subset, fixed before training."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "a random subset"

    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        return RandomMasker(self, sites, context)


class PlainWeight(MaskedWeight):
    def training_weight(self, weight: Tensor) -> Tensor:
        return weight


class RandomMasker(Masker):
    def __init__(self, method: Random, sites: Sequence[Site], context: Context) -> None:
        super().__init__(sites, [PlainWeight(site) for site in sites], method.keep_of(sites))
        self.seed = context.seed
        self.moments: list[str] = []
        self.freeze()

    def choose(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        sizes = [weight.numel() for weight in self.weights]
        order = torch.randperm(sum(sizes), generator=generator)
        flat = torch.zeros(sum(sizes), dtype=torch.bool)
        flat[order[: self.keep]] = True
        parts = flat.split(sizes)
        return [part.view(w.shape) for part, w in zip(parts, self.weights, strict=True)]

    def before_forward(self, now: Progress, draw: int) -> None:
        self.moments.append(f"before {now.step}")

    def after_backward(self, now: Progress, optimizers: WeightOptimizers) -> None:
        assert all(parameter.grad is not None for parameter in optimizers.parameters)
        self.moments.append(f"backward {now.step}")

    def after_update(self, now: Progress, optimizers: WeightOptimizers) -> None:
        self.moments.append(f"update {now.step}")


class Scaled(MaskedWeight):
    """One site with a trainable scale."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.scale = nn.Parameter(torch.ones(()))

    def training_weight(self, weight: Tensor) -> Tensor:
        return weight * self.scale


@dataclass(frozen=True, kw_only=True)
class Scaling(Method):
    """Keep the largest weights; learn a penalized scale per layer."""

    name: ClassVar[str] = "scaling"
    summary: ClassVar[str] = "the largest weights"

    def begin(self, sites: Sequence[Site], context: Context) -> Masker:
        return ScalingMasker(sites, [Scaled(site) for site in sites], self.keep_of(sites))


class ScalingMasker(Masker):
    def choose(self) -> list[Tensor]:
        return [weight.abs() >= weight.abs().median() for weight in self.weights]

    def trainables(self) -> list[Trainables]:
        scales = [masked.scale for masked in self.masked]
        return [
            Trainables(torch.optim.SGD(scales, lr=1.0), lambda now, _: 0.1 * (1 - now.fraction))
        ]

    def penalty(self) -> Tensor | float:
        return sum(masked.scale.square() for masked in self.masked)

    def metrics(self) -> dict[str, float]:
        return {"scale": sum(masked.scale.item() for masked in self.masked)}


def test_a_short_custom_method_trains_and_finalizes():
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model, Random(sparsity=0.75), optimizer=optimizer, total_steps=3, seed=4
    )
    start = [model[i].weight != 0 for i in (0, 2, 4)]
    assert sum(int(mask.sum()) for mask in start) == 100
    train(model, optimizer, make_batches("mlp", 3))
    summary = sparsifier.finalize()
    assert summary.kept == 100
    for mask, i in zip(start, (0, 2, 4), strict=True):
        assert torch.equal(model[i].weight != 0, mask)


def test_the_hooks_are_called_in_order():
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, Random(sparsity=0.5), optimizer=optimizer, total_steps=2)
    train(model, optimizer, make_batches("mlp", 2))
    assert sparsifier._masker.moments == [
        "before 0",
        "backward 0",
        "update 0",
        "before 1",
        "backward 1",
        "update 1",
        "before 2",
    ]


def test_the_settings_are_checked_for_every_method():
    with pytest.raises(
        probmask.InputError, match=r"Random\(sparsity=75\): .*; for 75 % pass 0\.75\."
    ):
        Random(sparsity=75)
    assert Random(sparsity=0.5).settings() == {"sparsity": 0.5}


def test_trainables_of_a_method_are_trained_at_its_own_rate():
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, Scaling(sparsity=0.5), optimizer=optimizer, total_steps=4)
    batches = make_batches("mlp", 4)
    scale = sparsifier._masker.masked[0].scale
    for count, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, batch) + sparsifier.penalty()
        (grad,) = torch.autograd.grad(loss, scale, retain_graph=True)
        expected = scale.detach() - 0.1 * (1 - count / 4) * grad
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(scale.detach(), expected)
    assert sparsifier.metrics()["scale"] == pytest.approx(
        sum(masked.scale.item() for masked in sparsifier._masker.masked)
    )


def test_a_custom_method_resumes():
    batches = make_batches("mlp", 4)

    def begin():
        model = build("mlp")
        optimizer = sgd(model)
        method = Scaling(sparsity=0.5)
        return (
            model,
            optimizer,
            probmask.attach(model, method, optimizer=optimizer, total_steps=4, seed=0),
        )

    whole, first, second = begin(), begin(), begin()
    train(whole[0], whole[1], batches, whole[2])
    train(first[0], first[1], batches[:2], first[2])
    for part, other in zip(second, first, strict=True):
        part.load_state_dict(other.state_dict())
    train(second[0], second[1], batches[2:], second[2])
    assert_same_state(state_of(whole[0]), state_of(second[0]))


def test_a_loss_without_the_penalty_of_the_method_raises():
    model = build("mlp")
    optimizer = sgd(model)
    method = Scaling(sparsity=0.5)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=4)
    batches = make_batches("mlp", 2)
    step(model, optimizer, batches[0], sparsifier)
    with pytest.raises(probmask.InputError, match=r"Scaling: .* loss \+ sparsifier\.penalty\(\)"):
        step(model, optimizer, batches[1])
    assert sparsifier.now.step == 1


def test_progress_counts_updates_and_epochs():
    now = Progress(step=7, total_steps=20, steps_per_epoch=3)
    assert (now.fraction, now.epoch, now.epochs) == (0.35, 2, 7)
    assert now.epoch_fraction == 2 / 7
    assert Progress(30, 20, 3).fraction == Progress(30, 20, 3).epoch_fraction == 1


def test_the_context_has_the_arguments_of_attach():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Look(Method):
        name: ClassVar[str] = "look"
        summary: ClassVar[str] = "looks"

        def begin(self, sites: Sequence[Site], context: Context) -> Masker:
            seen.append((context.total_steps, context.steps_per_epoch, context.seed))
            seen.append(context.macs_per_weight())
            return probmask.StoredMasker(self, sites)

    model = build("mlp")
    probmask.attach(
        model,
        Look(sparsity=0.5),
        total_steps=40,
        steps_per_epoch=4,
        seed=9,
        example_inputs=torch.randn(2, 6),
    )
    assert seen == [(40, 4, 9), (1, 1, 1)]
    step(model, sgd(model), make_batches("mlp", 1)[0])


def test_the_tensors_of_a_method_follow_the_model():
    """Those of a site and those of the masker, which SNFS has: both keep their dtype."""
    model = build("mlp")
    optimizer = sgd(model, momentum=0.0)  # SNFS then keeps running sums of its own
    method = probmask.methods.SNFS(sparsity=0.5)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=4)
    train(model, optimizer, make_batches("mlp", 1))
    masker = sparsifier._masker
    before = [tensor.dtype for name in masker.saved for tensor in tensors_in(getattr(masker, name))]
    for masked in masker.masked:  # what model.to(device) calls; model.to("meta") raises
        masked._apply(lambda tensor: tensor.to("meta"))
    after = [tensor for name in masker.saved for tensor in tensors_in(getattr(masker, name))]
    assert after
    assert {tensor.device.type for tensor in after} == {"meta"}
    assert [tensor.dtype for tensor in after] == before
    assert {masked.active.device.type for masked in masker.masked} == {"meta"}


def tensors_in(value):
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for item in items for t in tensors_in(item)] if isinstance(value, dict | list) else []


def test_moving_a_masked_model_to_the_meta_device_raises():
    model = build("mlp")
    sparsifier = probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=4)
    with pytest.raises(probmask.InputError, match=r"model\.to\('meta'\): this discards"):
        model.to("meta")
    assert not model[0].weight.is_meta
    sparsifier.finalize()
    model.to("meta")
