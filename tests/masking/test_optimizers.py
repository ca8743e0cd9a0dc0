"""Masks are updated once per step of the followed optimizers, however these are passed."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from probmask.errors import InputError, RefilledWeightsWarning
from reference import probmask as twin
from reference import probmask_tied as tied_twin
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

STEPS = 12


def attach(model, form, **arguments):
    settings = {"total_steps": STEPS, "seed": 5} | arguments
    return probmask.attach(model, method_of(form, sparsity=0.8), **settings)


def made_before(model, form):
    optimizer = sgd(model)
    return attach(model, form, optimizer=optimizer), optimizer


def made_after_and_used(model, form):
    sparsifier = attach(model, form)
    optimizer = sgd(model)
    sparsifier.use(optimizer)
    return sparsifier, optimizer


def named_twice(model, form):
    sparsifier, optimizer = made_before(model, form)
    sparsifier.use(optimizer)
    return sparsifier, optimizer


WAYS = [made_before, made_after_and_used, named_twice]


def by_hand(batches, form):
    """Train the MLP by the reference; return weights, biases and, if learned, probabilities."""
    model = build("mlp")
    linears = [model[0], model[2], model[4]]
    w = [layer.weight for layer in linears]
    b = [layer.bias for layer in linears]

    def network(weights, biases, batch):
        x, y = batch
        x = functional.relu(functional.linear(x.to(biases[0]), weights[0], biases[0]))
        x = torch.tanh(functional.linear(x, weights[1], biases[1]))
        return functional.cross_entropy(functional.linear(x, weights[2], biases[2]), y)

    if form == "tied":
        w, b = tied_twin.train(w, b, network, batches, sparsity=0.8, lr=0.1, total=STEPS)
        return w, b, []
    s, _ = twin.train(w, b, network, batches, sparsity=0.8, seed=5, lr=0.1, total=STEPS)
    return w, b, s


def assert_made_by_hand(model, form, batches):
    """Compare up to rounding: kernels and fused Adam sum in another order than the reference."""
    w, b, s = by_hand(batches, form)
    layers = [model[0], model[2], model[4]]
    ours = [layer._parameters["weight"] for layer in layers]
    ours += [*(layer.bias for layer in layers), *probs_of(model).values()]
    for one, other in zip(ours, [*w, *b, *s], strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_pass_an_optimizer_equals_the_reference(form, way):
    batches = make_batches("mlp", STEPS - 1)  # the last update would freeze tied masks
    model = build("mlp")
    sparsifier, optimizer = way(model, form)
    train(model, optimizer, batches)
    assert_made_by_hand(model, form, batches)
    assert sparsifier.now.step == STEPS - 1


@pytest.mark.parametrize("way", WAYS)
def test_probabilities_belong_to_no_other_optimizer(way):
    model = build("mlp")
    sparsifier, optimizer = way(model, "learned")
    step(model, optimizer, make_batches("mlp", 1)[0])
    ours = {id(prob) for prob in probs_of(model).values()}
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == 6
    assert not ours & set(held)
    assert not ours & {id(p) for p in optimizer.state}
    assert sparsifier.now.step == 1


def test_an_optimizer_of_a_copy_raises_before_it_steps(form):
    model = build("mlp")
    optimizer = sgd(copy.deepcopy(model))
    sparsifier = attach(model, form, optimizer=optimizer)
    loss_of(model, make_batches("mlp", 1)[0]).backward()
    with pytest.raises(probmask.InputError, match=r"holds no parameter of the attached model"):
        optimizer.step()
    assert sparsifier.now.step == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers_make_one_update(form, order):
    """They may step in any order."""
    batches = make_batches("mlp", STEPS)
    one = build("mlp")
    _, single = made_before(one, form)
    train(one, single, batches)

    two = build("mlp")
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
    first = torch.optim.SGD(two[0].parameters(), **settings)
    second = torch.optim.SGD([*two[2].parameters(), *two[4].parameters()], **settings)
    sparsifier = attach(two, form, optimizer=[first, second])
    for batch in batches:
        first.zero_grad()
        second.zero_grad()
        loss_of(two, batch).backward()
        for index in order:
            (first, second)[index].step()
    assert sparsifier.now.step == STEPS
    assert_same_state(state_of(one), state_of(two))


def test_gradients_of_own_parameters_are_not_lost_between_two_optimizers():
    model = build("mlp")
    optimizers = [torch.optim.SGD(model[index].parameters(), lr=0.1) for index in (0, 2)]
    sparsifier = attach(model, "learned", optimizer=optimizers)
    (batch,) = make_batches("mlp", 1)
    loss_of(model, batch).backward()
    optimizers[0].step()
    with pytest.raises(probmask.InputError, match="whose gradients would be lost"):
        optimizers[1].zero_grad()
    assert sparsifier.now.step == 0


@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_that_is_not_followed_raises(form, known):
    """The next backward pass raises: the sparsifier does not hook other optimizers."""
    model = build("mlp")
    sparsifier = attach(model, form)
    if known:
        sparsifier.use(sgd(model))
    rogue = torch.optim.Adam(model.parameters())
    first, second = make_batches("mlp", 2)
    step(model, rogue, first)
    followed = "another optimizer" if known else "no optimizer"
    with pytest.raises(
        probmask.InputError, match=rf"follows {followed}; call sparsifier\.use\(optimizer\)"
    ):
        step(model, rogue, second)


def test_use_replaces_the_old_optimizer(form):
    model = build("mlp")
    sparsifier, old = made_before(model, form)
    batches = make_batches("mlp", 4)
    step(model, old, batches[0])
    new = torch.optim.Adam(model.parameters(), lr=1e-3)
    sparsifier.use(new)
    step(model, new, batches[1])
    assert sparsifier.now.step == 2
    step(model, old, batches[2])
    assert sparsifier.now.step == 2
    with pytest.raises(probmask.InputError, match="follows another optimizer"):
        step(model, old, batches[3])


def test_changes_that_are_not_training_do_not_raise(form):
    """Accumulated gradients, skipped updates, weights set between two updates."""
    model = build("mlp")
    sparsifier, optimizer = made_before(model, form)
    batches = make_batches("mlp", 3)
    for batch in batches:
        loss_of(model, batch).backward()
    optimizer.zero_grad()
    loss_of(model, batches[0]).backward()
    optimizer.step()
    with torch.no_grad():
        model[0]._parameters["weight"].mul_(0.9)
    step(model, optimizer, batches[1])
    assert sparsifier.now.step == 2


def test_two_models_two_sparsifiers(form):
    models = [build("mlp"), build("mlp", seed=1)]
    optimizers = [sgd(model) for model in models]
    pairs = zip(models, optimizers, strict=True)
    sparsifiers = [attach(model, form, optimizer=optimizer) for model, optimizer in pairs]
    batches = make_batches("mlp", STEPS)
    for batch in batches:
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, batch)
    assert [s.now.step for s in sparsifiers] == [STEPS, STEPS]
    alone = build("mlp")
    _, optimizer = made_before(alone, form)
    train(alone, optimizer, batches)
    assert_same_state(state_of(alone), state_of(models[0]))


def test_two_models_one_optimizer(form):
    models = [build("mlp"), build("mlp", seed=1)]
    optimizer = torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.1)
    sparsifiers = [attach(model, form, optimizer=optimizer) for model in models]
    batch = make_batches("mlp", 1)[0]

    def backward():
        sum(loss_of(model, batch) for model in models).backward()

    for _ in range(3):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    assert [s.now.step for s in sparsifiers] == [3, 3]
    sparsifiers[0].finalize()
    backward()
    optimizer.zero_grad()  # a skipped update, which must not affect later updates
    assert all(prob.grad is None for prob in probs_of(models[1]).values())


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure(form, by_keyword):
    batches = make_batches("mlp", STEPS)
    plain = build("mlp")
    _, optimizer = made_before(plain, form)
    train(plain, optimizer, batches)

    model = build("mlp")
    optimizer = sgd(model)
    attach(model, form, optimizer=optimizer)
    losses = []
    for batch in batches:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        returned = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        losses.append(returned.item())
    assert len(losses) == STEPS
    assert_same_state(state_of(plain), state_of(model))


def test_gradients_of_a_closure_are_clipped_before_they_are_used(form):
    batch = make_batches("mlp", 1)[0]
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = method_of(form, sparsity=0.8, clip_norm=1e-3)
    probmask.attach(model, settings, optimizer=optimizer, total_steps=100, seed=5)
    weights = [p for name, p in model.named_parameters() if not name.endswith(".prob")]
    before = [p.detach().clone() for p in weights]

    def closure():
        optimizer.zero_grad()
        loss = 100 * loss_of(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    moved = torch.stack([(p - q).norm() for p, q in zip(weights, before, strict=True)]).norm()
    assert 0 < moved <= 1.001e-3


def test_lbfgs_which_keeps_its_own_list_of_parameters(form):
    model = build("mlp")
    sparsifier = attach(model, form)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparsifier.use(optimizer)
    batch = make_batches("mlp", 1)[0]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert sparsifier.now.step == 3
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    for prob in probs_of(model).values():
        assert ((prob >= 0) & (prob <= 1)).all()
    assert sparsifier.finalize().kept == 80


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_skipped_update_leaves_no_gradient(form, set_to_none):
    """On overflow, AMP's GradScaler skips step(); the next update calls zero_grad()."""
    batches = make_batches("mlp", 4)
    model = build("mlp")
    _, optimizer = made_before(model, form)
    loss_of(model, batches[-1]).backward()
    extra = [prob.grad is not None for prob in probs_of(model).values()]
    assert any(extra) == (form == "learned")
    for batch in batches:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, batch).backward()
        optimizer.step()
    plain = build("mlp")
    _, optimizer = made_before(plain, form)
    train(plain, optimizer, batches)
    assert_same_state(state_of(plain), state_of(model))


def test_grad_scaler_equals_unscaled_training(form):
    """A power of two scales exactly, so the probabilities must be equal too."""
    batches = make_batches("mlp", 8)
    plain = build("mlp")
    _, optimizer = made_before(plain, form)
    train(plain, optimizer, batches)

    model = build("mlp")
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    attach(model, form, optimizer=optimizer, scaler=scaler)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    for name, value in state_of(plain).items():
        torch.testing.assert_close(state_of(model)[name], value, rtol=1e-4, atol=1e-5)


def test_a_fused_optimizer_with_a_grad_scaler_raises(form):
    """Its gradients are 65,536 times too large when a method uses them."""
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    attach(model, form, optimizer=optimizer, scaler=scaler)
    scaler.scale(loss_of(model, make_batches("mlp", 1)[0])).backward()
    with pytest.raises(probmask.InputError, match="build it with fused=False"):
        scaler.step(optimizer)


def test_grad_scaler_skips_the_whole_update_on_overflow(form):
    model = build("mlp")
    sparsifier, optimizer = made_before(model, form)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    inputs, labels = make_batches("mlp", 1)[0]
    before = state_of(model)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, (inputs * torch.inf, labels))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert sparsifier.now.step == 0
    assert_same_state(before, state_of(model))
    optimizer.zero_grad()
    scaler.scale(loss_of(model, (inputs, labels))).backward()
    scaler.step(optimizer)
    assert sparsifier.now.step == 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_scheduler_built_before_attach_still_works(form):
    model = build("mlp")
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    sparsifier = attach(model, form, optimizer=optimizer)
    rates = []
    for batch in make_batches("mlp", 6):
        step(model, optimizer, batch)
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    assert sparsifier.now.step == 6


def test_finalize_restores_the_optimizer(form):
    model = build("mlp")
    optimizer = sgd(model)
    attributes = set(vars(optimizer))
    sparsifier = attach(model, form, optimizer=optimizer)
    train(model, optimizer, make_batches("mlp", 3))
    sparsifier.finalize()
    assert set(vars(optimizer)) == attributes
    with pytest.warns(RefilledWeightsWarning):
        train(model, optimizer, make_batches("mlp", 2))
    assert sparsifier.now.step == 3


def test_stepping_the_optimizer_after_finalize_warns_once(form):
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = attach(model, form, optimizer=optimizer)
    train(model, optimizer, make_batches("mlp", 3))
    kept = sparsifier.finalize().kept
    optimizer.zero_grad()
    optimizer.step()  # without gradients it changes nothing
    with pytest.warns(RefilledWeightsWarning, match="freeze_masks") as caught:
        train(model, optimizer, make_batches("mlp", 2))
    assert len(caught) == 1
    assert sum(int(p.count_nonzero()) for p in model.parameters() if p.ndim > 1) > kept


@pytest.mark.parametrize("again", ["freeze_masks", "attach"])
def test_masks_that_are_put_on_again_keep_the_zeros_without_a_warning(form, again):
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = attach(model, form, optimizer=optimizer)
    train(model, optimizer, make_batches("mlp", 3))
    kept = sparsifier.finalize().kept
    if again == "attach":
        masks = attach(model, form, optimizer=optimizer)
    else:
        masks = probmask.freeze_masks(model)
    train(model, optimizer, make_batches("mlp", 2))
    assert masks.finalize().kept == kept


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does: a subclass that never initializes its base class."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


def test_a_wrapped_optimizer_is_followed(form):
    model = build("mlp")
    optimizer = Wrapper(sgd(model))
    sparsifier = attach(model, form, optimizer=optimizer)
    batches = make_batches("mlp", STEPS - 1)
    train(model, optimizer, batches)
    assert sparsifier.now.step == STEPS - 1
    assert_made_by_hand(model, form, batches)


def test_a_wrapper_around_nothing_raises_and_the_model_is_unchanged(form):
    model = build("mlp")
    with pytest.raises(InputError, match=r"attach\(optimizer=Wrapper\)"):
        attach(model, form, optimizer=Wrapper(None))
    assert type(model[0]) is nn.Linear


def test_a_step_inside_backward_raises(form):
    model = build("mlp")
    optimizer = sgd(model)
    attach(model, form, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(InputError, match=r"inside backward.*after loss\.backward"):
        model(make_batches("mlp", 1)[0][0]).sum().backward()


def test_a_sparsifier_without_references_still_works(form):
    """If a helper function calls attach() and drops the result, the method must still act."""
    model = build("mlp")
    optimizer = sgd(model)
    attach(model, form, optimizer=optimizer)
    gc.collect()
    batches = make_batches("mlp", STEPS - 1)
    train(model, optimizer, batches)
    assert_made_by_hand(model, form, batches)


@pytest.mark.parametrize("optimizer", [[], object(), [object()], "sgd"])
def test_a_non_optimizer_raises_and_the_model_is_unchanged(form, optimizer):
    model = build("mlp")
    keys = list(model.state_dict())
    with pytest.raises(probmask.InputError, match="optimizer"):
        attach(model, form, optimizer=optimizer)
    assert list(model.state_dict()) == keys


def test_use_without_an_optimizer_raises(form):
    with pytest.raises(probmask.InputError, match="optimizer"):
        attach(build("mlp"), form).use()


def test_loading_optimizer_state_after_attach(form):
    model = build("mlp")
    _, optimizer = made_before(model, form)
    train(model, optimizer, make_batches("mlp", 3))
    saved = optimizer.state_dict()
    again = build("mlp")
    sparsifier, fresh = made_before(again, form)
    fresh.load_state_dict(saved)
    step(again, fresh, make_batches("mlp", 1)[0])
    assert sparsifier.now.step == 1


def test_other_optimizers(form):
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        model = build("mlp")
        optimizer = make(model.parameters(), lr=1e-2)
        sparsifier = attach(model, form, optimizer=optimizer)
        train(model, optimizer, make_batches("mlp", STEPS))
        assert sparsifier.finalize().kept == 80


def test_dense_follows_an_optimizer_too():
    model, plain = build("mlp"), build("mlp")
    batches = make_batches("mlp", 5)
    optimizer = sgd(model)
    sparsifier = probmask.attach(model, probmask.Dense(), optimizer=optimizer, total_steps=5)
    train(model, optimizer, batches)
    train(plain, sgd(plain), batches)
    summary = sparsifier.finalize()
    assert (summary.kept, summary.sparsity) == (400, 0)
    assert_same_state(state_of(model), state_of(plain))
    assert isinstance(model[0], nn.Linear)
