"""finalize(data=…) re-estimates the BatchNorm statistics of the final network."""

import pytest
import torch
from torch import nn

import probmask
from probmask.masking.batchnorm import reestimate_batchnorm
from reference.networks import build, make_batches, sgd, train


def trained(name="conv", **settings):
    model = build(name)
    settings = {"sparsity": 0.8, "min_keep_per_layer": 1} | settings
    optimizer, method = sgd(model), probmask.TiedProbMask(**settings)
    sparsifier = probmask.attach(model, method, optimizer=optimizer, total_steps=10, seed=1)
    train(model, optimizer, make_batches(name, 10))
    return model, sparsifier


def by_hand(layer, batches):
    """Return averages over batches of the mean and the unbiased variance, per channel."""
    outputs = [layer(inputs) for inputs in batches]
    means = torch.stack([out.mean(dim=(0, 2, 3)) for out in outputs]).mean(0)
    variances = torch.stack([out.var(dim=(0, 2, 3)) for out in outputs]).mean(0)
    return means.detach(), variances.detach()


FORMS = {
    "tensors": lambda batches: [x for x, _ in batches],
    "pairs": lambda batches: batches,
    "lists": lambda batches: [list(batch) for batch in batches],
    "dicts": lambda batches: [{"input": x} for x, _ in batches],
    "generator": lambda batches: (batch for batch in batches),
    "loader": lambda batches: torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(
            torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        ),
        batch_size=8,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_those_of_the_final_network(form):
    model, sparsifier = trained()
    batches = make_batches("conv", 5, seed=6)
    training = model.training
    sparsifier.finalize(data=FORMS[form](batches))
    mean, variance = by_hand(model[0], [x for x, _ in batches])
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model[1].running_var, variance, rtol=1e-5, atol=1e-6)
    assert model.training == training
    assert model[1].momentum == 0.1


def test_without_data_the_statistics_of_training_stay():
    model, sparsifier = trained()
    mean = model[1].running_mean.clone()
    sparsifier.finalize()
    assert torch.equal(model[1].running_mean, mean)


def test_only_batchnorm_is_in_training_mode():
    """The mode of every module is restored afterwards."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.train()
    model[3].eval()
    inputs = torch.randn(64, 4)
    assert reestimate_batchnorm(model, [inputs]) == 1
    torch.testing.assert_close(model[2].running_mean, model[0](inputs).mean(0))
    assert [module.training for module in model] == [True, True, True, False]


def test_data_is_not_read_without_batchnorm():
    def never():
        raise AssertionError("read")
        yield

    model, sparsifier = trained("mlp")
    sparsifier.finalize(data=never())
    assert not isinstance(model[0], nn.BatchNorm1d)


def test_batchnorm_without_running_statistics_is_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert reestimate_batchnorm(model, []) == 0


def test_no_gradients_remain():
    model, sparsifier = trained()
    for parameter in model.parameters():
        parameter.grad = None
    sparsifier.finalize(data=make_batches("conv", 2))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_data_that_cannot_be_iterated_raises():
    _, sparsifier = trained()
    with pytest.raises(probmask.InputError, match=r"finalize\(data=int\): expected an iterable"):
        sparsifier.finalize(data=3)


def test_data_without_a_batch_raises():
    model, sparsifier = trained()
    with pytest.raises(probmask.InputError, match=r"finalize\(data=…\): it contains no batch"):
        sparsifier.finalize(data=[])
    assert model[0].weight.shape == (4, 1, 3, 3)


def test_a_failed_finalize_changes_nothing_and_can_be_repeated():
    """An exhausted generator is an easy mistake; it must not destroy the statistics."""
    model, sparsifier = trained()
    mean, variance = model[1].running_mean.clone(), model[1].running_var.clone()
    with pytest.raises(probmask.InputError, match="no batch"):
        sparsifier.finalize(data=iter(()))
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(model[1].running_var, variance)
    assert sparsifier.finalize(data=make_batches("conv", 1)).kept == round(0.2 * (36 + 432))


BAD_BATCHES = {"keyword": {"imgs": torch.ones(2)}, "number": 1, "shape": torch.ones(4, 7)}


@pytest.mark.parametrize("bad", BAD_BATCHES)
def test_data_that_the_model_cannot_use_raises_and_finalize_can_be_repeated(bad):
    model, sparsifier = trained()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    good = make_batches("conv", 2)
    with pytest.raises(probmask.InputError, match=r"finalize\(data=…\): the model cannot compute"):
        sparsifier.finalize(data=[*good, BAD_BATCHES[bad]])
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert sparsifier.finalize(data=good).kept == round(0.2 * (36 + 432))
    assert int(model[1].num_batches_tracked) == 2


def test_finalizing_twice_raises():
    _, sparsifier = trained()
    sparsifier.finalize()
    with pytest.raises(
        probmask.InputError, match=r"finalize\(\): this sparsifier is already finalized"
    ):
        sparsifier.finalize()
