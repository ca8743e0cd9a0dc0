"""finalize(data=…): BatchNorm statistics of the network as it now is."""

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
    """Plain averages over batches of the mean and the unbiased variance, per channel."""
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


def test_without_data_statistics_stay_as_training_left_them():
    model, sparsifier = trained()
    mean = model[1].running_mean.clone()
    sparsifier.finalize()
    assert torch.equal(model[1].running_mean, mean)


def test_modes_and_dropout_are_respected():
    """Only BatchNorm is in training mode, and every module gets its own mode back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    model.train()
    model[3].eval()
    inputs = torch.randn(64, 4)
    assert reestimate_batchnorm(model, [inputs]) == 1
    torch.testing.assert_close(model[2].running_mean, model[0](inputs).mean(0))
    assert [module.training for module in model] == [True, True, True, False]


def test_a_model_without_batchnorm_leaves_the_data_unread():
    def never():
        raise AssertionError("read")
        yield

    model, sparsifier = trained("mlp")
    sparsifier.finalize(data=never())
    assert not isinstance(model[0], nn.BatchNorm1d)


def test_batchnorm_without_running_statistics_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert reestimate_batchnorm(model, []) == 0


def test_no_gradients_are_left_behind():
    model, sparsifier = trained()
    for parameter in model.parameters():
        parameter.grad = None
    sparsifier.finalize(data=make_batches("conv", 2))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_data_without_a_batch_is_refused():
    model, sparsifier = trained()
    with pytest.raises(probmask.InputError, match=r"finalize\(data=…\): it contains no batch"):
        sparsifier.finalize(data=[])
    assert model[0].weight.shape == (4, 1, 3, 3)


def test_a_refused_finalize_destroys_nothing_and_can_be_repeated():
    """A spent generator is an easy mistake; statistics must not be lost over it."""
    model, sparsifier = trained()
    mean, variance = model[1].running_mean.clone(), model[1].running_var.clone()
    with pytest.raises(probmask.InputError, match="no batch"):
        sparsifier.finalize(data=iter(()))
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(model[1].running_var, variance)
    assert sparsifier.finalize(data=make_batches("conv", 1)).kept == round(0.2 * (36 + 432))


def test_finalize_twice_is_refused():
    _, sparsifier = trained()
    sparsifier.finalize()
    with pytest.raises(
        probmask.InputError, match=r"finalize\(\): this sparsifier is finished; attach a new one"
    ):
        sparsifier.finalize()
