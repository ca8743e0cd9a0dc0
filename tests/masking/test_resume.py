"""An interrupted and resumed training equals an uninterrupted one bit for bit."""

import copy
import io

import pytest
import torch
from torch import nn

import probmask
from probmask.methods import METHODS as METHODS_OF_ALL
from reference.networks import (
    assert_same_state,
    build,
    loss_of,
    make_batches,
    mlp,
    sgd,
    state_of,
)

STEPS = 20
METHODS = {
    "tied": probmask.TiedProbMask(sparsity=0.8),  # conv has BatchNorm: initial values fade
    "tied, frozen": probmask.TiedProbMask(sparsity=0.8, freeze_at=0.6, min_keep_per_layer=1),
    "tied layer": probmask.TiedProbMask(sparsity=0.8, scope="layer", every="epoch"),
    "learned": probmask.ProbMask(sparsity=0.8, min_keep_per_layer=1),
    "draws": probmask.ProbMask(sparsity=0.8, min_keep_per_layer=1, draws=2),
    "layer": probmask.ProbMask(sparsity=0.8, scope="layer"),
    "paper": probmask.ProbMask(sparsity=0.8, recipe="paper"),
    "official": probmask.ProbMask(sparsity=0.8, compat="official", min_keep_per_layer=1),
    "sample": probmask.ProbMask(sparsity=0.5, select="sample"),
    "supermask": probmask.ProbMask(sparsity=0.8, train_weights=False, min_keep_per_layer=1),
    "none": probmask.TiedProbMask(sparsity=0),
    "dense": probmask.Dense(),
}


def begin(method, name="conv", seed=7):
    model = build(name)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(11)
    sparsifier = probmask.attach(
        model, method, optimizer=optimizer, total_steps=STEPS, steps_per_epoch=2, seed=seed
    )
    return model, optimizer, scheduler, sparsifier


def go_on(model, optimizer, scheduler, sparsifier, batches):
    for batch in batches:
        optimizer.zero_grad()
        for share in sparsifier.draws():
            (share * loss_of(model, batch)).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("stop", [0, 1, 9, 12, 13, 19])  # frozen at the thirteenth update or before
def test_resuming_is_bit_identical(name, stop):
    batches = make_batches("conv", STEPS)
    whole = begin(METHODS[name])
    go_on(*whole, batches)

    first = begin(METHODS[name])
    go_on(*first, batches[:stop])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)

    second = begin(METHODS[name])
    with torch.no_grad():
        for parameter in second[0].parameters():
            parameter.add_(1)  # the initial values must not matter
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert second[3].now.step == stop
    go_on(*second, batches[stop:])
    assert_same_state(state_of(whole[0]), state_of(second[0]))
    assert whole[3].metrics() == second[3].metrics()
    assert whole[3].finalize() == second[3].finalize()
    assert_same_state(state_of(whole[0]), state_of(second[0]))


@pytest.mark.parametrize("stop", [9, 16, STEPS - 1])
@pytest.mark.parametrize("name", ["tied", "tied, frozen", "learned"])
def test_metrics_continue_as_without_interruption(name, stop):
    batches = make_batches("conv", STEPS)
    first, second = begin(METHODS[name]), begin(METHODS[name])
    go_on(*first, batches[:stop])
    for part, state in zip(second, [part.state_dict() for part in first], strict=True):
        part.load_state_dict(copy.deepcopy(state))
    assert first[3].metrics() == second[3].metrics()
    for parts in (first, second):
        go_on(*parts, batches[stop : stop + 1])
    assert first[3].metrics() == second[3].metrics()


def test_evaluation_after_loading_uses_the_loaded_network(form):
    batches = make_batches("conv", STEPS)
    first = begin(METHODS[form])
    go_on(*first, batches[:14])
    second = begin(METHODS[form])
    second[0].eval()  # computes the mask of the new network
    for part, state in zip(second, [part.state_dict() for part in first], strict=True):
        part.load_state_dict(state)
    inputs = batches[0][0]
    assert torch.equal(first[0].eval()(inputs), second[0](inputs))


@pytest.mark.parametrize("name", ["tied", "tied, frozen", "learned"])
def test_loading_a_state_from_before_the_freeze(name):
    batches = make_batches("conv", STEPS)
    parts = begin(METHODS[name])
    go_on(*parts, batches[:5])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    go_on(*parts, batches[5:])
    expected = state_of(parts[0])
    file.seek(0)
    for part, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go_on(*parts, batches[5:])
    assert_same_state(expected, state_of(parts[0]))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (probmask.TiedProbMask(sparsity=0.5), "sparsity was 0.8 and is 0.5"),
        (probmask.TiedProbMask(sparsity=0.8, outside=0.1), "outside was None and is 0.1"),
        (probmask.TiedProbMask(sparsity=0.8, ramp_end=0.6), "ramp_end was 0.5 and is 0.6"),
        (METHODS_OF_ALL["feather"](sparsity=0.8), "method was 'probmask-tied' and is 'feather'"),
    ],
)
def test_a_checkpoint_of_another_training_raises(other, message):
    saved = begin(METHODS["tied"])[3].state_dict()
    sparsifier = begin(other)[3]
    with pytest.raises(probmask.InputError, match=message):
        sparsifier.load_state_dict(saved)
    assert sparsifier.now.step == 0


def test_a_checkpoint_of_a_longer_training_raises():
    saved = probmask.attach(build("conv"), METHODS["tied"], total_steps=STEPS).state_dict()
    shorter = probmask.attach(build("conv"), METHODS["tied"], total_steps=STEPS // 2)
    # It names what was passed: by default, steps_per_epoch differs too.
    with pytest.raises(probmask.InputError, match=r"training: total_steps was 20 and is 10\. Call"):
        shorter.load_state_dict(saved)
    epochs = probmask.attach(
        build("conv"), METHODS["tied"], total_steps=STEPS, steps_per_epoch=STEPS
    )
    with pytest.raises(probmask.InputError, match="steps_per_epoch was None and is 20"):
        epochs.load_state_dict(saved)


@pytest.mark.parametrize("name", ["tied", "learned"])
@pytest.mark.parametrize("change", ["exclude", "width"])
def test_a_state_of_other_weights_raises_and_changes_nothing(name, change):
    method = METHODS[name]
    saved = probmask.attach(mlp(), method, total_steps=STEPS).state_dict()
    model, exclude = mlp(), []
    if change == "exclude":
        exclude = ["2"]
        message = r"2\.weight was 16×16 and is not masked\. Call attach with the same model"
    else:
        model[4] = nn.Linear(16, 5)
        message = r"4\.weight was 3×16 and is 5×16"
    sparsifier = probmask.attach(model, method, total_steps=STEPS, exclude=exclude)
    saved["step"] = 6
    with pytest.raises(probmask.InputError, match=message):
        sparsifier.load_state_dict(saved)
    assert sparsifier.now.step == 0


def test_a_finalized_sparsifier_is_not_used_again():
    _, optimizer, _, sparsifier = begin(METHODS["tied"])
    saved = sparsifier.state_dict()
    sparsifier.finalize()
    for call in (lambda: sparsifier.use(optimizer), lambda: sparsifier.load_state_dict(saved)):
        with pytest.raises(probmask.InputError, match="already finalized"):
            call()


def test_a_state_of_another_object_raises():
    model, optimizer, _, sparsifier = begin(METHODS["tied"])
    whole = {"model": model.state_dict(), "sparsifier": sparsifier.state_dict()}
    for other in (whole, optimizer.state_dict(), {}, None):
        with pytest.raises(
            probmask.InputError,
            match=r"missing keys .*'training'.*return value of sparsifier\.state_dict\(\)",
        ):
            sparsifier.load_state_dict(other)


def test_a_state_contains_its_seed():
    """A script that attaches without a seed must continue with the saved seed."""
    first, second = begin(METHODS["learned"], seed=7), begin(METHODS["learned"], seed=8)
    second[3].load_state_dict(first[3].state_dict())
    masked = list(zip(first[3]._masker.masked, second[3]._masker.masked, strict=True))
    assert len(masked) == 2
    for one, other in masked:
        assert torch.equal(one.noise, other.noise)


def test_the_default_seed_is_drawn_from_pytorchs_generator():
    states = []
    for start in (1, 1, 2):
        parts = begin(METHODS["learned"], seed=None)
        torch.manual_seed(start)
        model = build("conv")
        torch.manual_seed(start)
        sparsifier = probmask.attach(model, METHODS["learned"], total_steps=STEPS)
        states.append(sparsifier.state_dict()["method"]["values"]["seed"])
        assert parts[3].now.step == 0
    assert states[0] == states[1] != states[2]


def test_a_given_seed_does_not_use_pytorchs_generator(form):
    model = build("conv")
    before = torch.get_rng_state()
    probmask.attach(model, METHODS[form], total_steps=STEPS, seed=1)
    assert torch.equal(before, torch.get_rng_state())
