"""Learning-rate rewinding: the rounds of the lottery, but weights are not rewound."""

import pytest
import torch
from torch import nn

import probmask
from probmask.methods.lottery import Lottery
from probmask.methods.lr_rewind import LRRewind
from reference.networks import build, make_batches, sgd, train

PER_EPOCH = 2


def begin(name="conv", epochs=4, sparsity=0.5, **settings):
    model = build(name)
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        LRRewind(sparsity=sparsity, **{"dense_last": False} | settings),
        optimizer=optimizer,
        total_steps=epochs * PER_EPOCH,
        steps_per_epoch=PER_EPOCH,
        seed=0,
    )
    return model, optimizer, sparsifier


def test_it_is_the_published_loop():
    """Train an epoch, prune the smallest weights, continue with a new optimizer; three times."""
    twin = build("conv")
    weights = [twin[0].weight, twin[4].weight]
    masks = [torch.ones_like(w) for w in weights]
    batches = make_batches("conv", 8)
    for start, keep in ((0, 371), (2, 295), (4, 234), (6, None)):
        optimizer = sgd(twin)
        for inputs, labels in batches[start : start + 2]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(inputs), labels).backward()
            for weight, mask in zip(weights, masks, strict=True):
                weight.grad.mul_(mask)
            optimizer.step()
        if keep is not None:
            sizes = torch.cat([w.detach().abs().flatten() for w in weights])
            threshold = sizes.sort(descending=True).values[keep - 1]
            masks = [(w.detach().abs() >= threshold).float() for w in weights]
            with torch.no_grad():
                for weight, mask in zip(weights, masks, strict=True):
                    weight.mul_(mask)
    model, optimizer, sparsifier = begin()
    train(model, optimizer, batches)
    assert sparsifier.finalize().kept == 234
    for (name, one), other in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one.abs(), other.abs(), msg=name)


def test_weights_and_statistics_stay_and_momentum_restarts():
    model, optimizer, sparsifier = begin()
    batches = make_batches("conv", 8)
    train(model, optimizer, batches[:2])
    dense = build("conv")
    train(dense, sgd(dense), batches[:2])
    kept = model[0].weight != 0
    assert torch.equal(model[0].weight[kept], dense[0].weight[kept])
    assert torch.equal(model[1].running_mean, dense[1].running_mean)
    assert int(model[1].num_batches_tracked) == 2
    assert not optimizer.state
    assert not sparsifier.frozen


def test_its_rounds_are_those_of_the_lottery():
    for epochs in (2, 5, 60):
        mine, theirs = LRRewind(sparsity=0.95), Lottery(sparsity=0.95)
        assert mine.phases(epochs) == theirs.phases(epochs)
        assert all(phase.rate == "cosine" for phase in mine.phases(epochs))
        assert all(phase.rate_scale == 1 for phase in mine.phases(epochs))


def test_errors_name_the_method():
    with pytest.raises(
        probmask.InputError, match=r"LRRewind\(prune_per_round=1\): must be the fraction"
    ):
        LRRewind(sparsity=0.9, prune_per_round=1)
    with pytest.raises(probmask.InputError, match=r"LRRewind: .* takes 2 epochs, not 1"):
        LRRewind(sparsity=0.9).phases(1)
    with pytest.raises(
        probmask.InputError, match=r"LRRewind\(sparsity=0.999\): none of the 320 weights"
    ):
        begin("depthwise", sparsity=0.999)
