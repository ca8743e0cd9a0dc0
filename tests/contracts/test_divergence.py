"""A training that diverges ends with an error that names a tensor, never with a NaN network."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import probmask
from contracts.training import NAMES, VARIANTS
from probmask.errors import LayerCollapseWarning, NonFiniteError
from probmask.methods import METHODS

STEPS, FAULT_AT = 8, 3
PROBING = {"grasp", "mlprune", "snip"}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.BatchNorm1d(10), nn.Linear(10, 3))


def batches(count):
    generator = torch.Generator().manual_seed(1)
    labels = [torch.randint(3, (8,), generator=generator) for _ in range(count)]
    return [(torch.randn(8, 6, generator=generator), label) for label in labels]


def poison_loss(model, images):
    return images * torch.nan


def poison_weight(model, images):
    model[0]._parameters["weight"].data.fill_(torch.nan)
    return images


def poison_one_weight(model, images):
    """One weight, which may be pruned: the network may then recover."""
    model[0]._parameters["weight"].data[0, 0] = torch.inf
    return images


def poison_gradient(model, images):
    """The gradients of the first layer overflow."""

    def overflow(module, inputs, outputs):
        outputs.register_hook(lambda gradient: gradient + torch.inf)

    model[0].register_forward_hook(overflow)
    return images


FAULTS = [poison_loss, poison_weight, poison_one_weight, poison_gradient]


def attached(name, model, *, probe=None):
    settings = {} if name == "dense" else {"sparsity": 0.5}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sparsifier = probmask.attach(
        model,
        METHODS[name.split()[0]](**settings, **VARIANTS.get(name, {})),
        optimizer=optimizer,
        total_steps=STEPS,
        steps_per_epoch=2,
        probe=probmask.Probe(probe or batches(2)),
        seed=3,
    )
    return optimizer, sparsifier


def train(model, optimizer, sparsifier, fault=None):
    for step, (images, labels) in enumerate(batches(STEPS)):
        if fault is not None and step == FAULT_AT:
            images = fault(model, images)
        optimizer.zero_grad()
        for share in sparsifier.draws():
            loss = nn.functional.cross_entropy(model(images), labels)
            (share * (loss + sparsifier.penalty())).backward()
            sparsifier.observe(loss)
        optimizer.step()
        sparsifier.metrics()
        sparsifier.histograms()


def error_of_training(name, model, fault):
    """Return the message of the `NonFiniteError` that the training ends with, or None."""
    optimizer, sparsifier = attached(name, model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayerCollapseWarning)
            train(model, optimizer, sparsifier, fault)
            sparsifier.finalize()
    except NonFiniteError as error:
        return str(error)
    return None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_that_diverges_names_the_tensor(name, fault):
    model = network()
    tensors = "|".join(map(re.escape, model.state_dict()))
    message = error_of_training(name, model, fault)
    if message is None:
        assert fault is poison_one_weight
        assert all(value.isfinite().all() for value in model.state_dict().values())
    else:
        moment = r"(after \d+ updates|finalize\(\)): (the (gradient|method's parameters) of )?"
        what = rf"({tensors}) contains? (NaN|infinity)\. .*lower the learning rate"
        assert re.match(moment + what, message)


@pytest.mark.parametrize("name", sorted(PROBING))
def test_a_probe_with_nan_is_named(name):
    model = network()
    with pytest.raises(NonFiniteError, match=r"the scores of 0\.weight, measured on the probe"):
        train(model, *attached(name, model, probe=[(x * torch.nan, y) for x, y in batches(2)]))


def test_a_network_recovers_from_a_diverged_training_and_from_nan_statistics():
    """The failed finalize leaves the masks, so that an earlier state can be loaded and finished."""
    model = network()
    optimizer, sparsifier = attached("random", model)
    train(model, optimizer, sparsifier)
    earlier = copy.deepcopy((model.state_dict(), sparsifier.state_dict()))
    model(torch.full((8, 6), torch.nan))
    with pytest.raises(NonFiniteError, match=r"finalize\(\): 2\.running_mean contains NaN.*data="):
        sparsifier.finalize()
    with torch.no_grad():
        model[3].bias.fill_(torch.inf)
    with pytest.raises(NonFiniteError, match=r"finalize\(\): 3\.bias contains infinity"):
        sparsifier.finalize(data=batches(2))
    model.load_state_dict(earlier[0])
    sparsifier.load_state_dict(earlier[1])
    assert sparsifier.finalize(data=batches(2)).sparsity == 0.5


def test_frozen_masks_do_not_finalize_a_nan_network():
    model = network()
    with torch.no_grad():
        model[0].weight[0] = 0.0
    frozen = probmask.freeze_masks(model)
    with torch.no_grad():
        model[0]._parameters["weight"][:2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"finalize\(\): 0\.weight contains NaN"):
        frozen.finalize()


def test_a_network_with_nan_is_not_attached():
    model = network()
    with torch.no_grad():
        model[3].weight[0, 0] = torch.nan
    with pytest.raises(probmask.InputError, match=r"attach\(model\): 3\.weight contains NaN; pass"):
        attached("probmask-tied", model)
