"""HAM, the multiplicative step after each step of an optimizer, against a slow twin."""

import copy
import io
import math

import pytest
import torch
from torch import nn

import probmask
from probmask.optim import HAM
from reference.networks import build, loss_of, make_batches, train


def step_entry_by_entry(model, optimizer, *, alpha, beta, max_grad_norm):
    """Do what HAM does, one entry at a time."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    if norm > max_grad_norm:
        for p in parameters:
            p.grad.mul_(max_grad_norm / norm)
    optimizer.step()
    rate = optimizer.param_groups[0]["lr"]
    with torch.no_grad():
        for p in parameters:
            if p.ndim < 2:
                continue
            flat, grads = p.reshape(-1), p.grad.reshape(-1)
            for i in range(len(flat)):
                w, g = float(flat[i]), float(grads[i])
                sign = (w > 0) - (w < 0)
                flat[i] = w * math.exp(min(5.0, max(-5.0, rate * (-alpha * sign * g - beta))))


def optimizer_of(model, kind):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("max_grad_norm", [20.0, 0.05])
def test_the_steps_are_those_of_the_twin(kind, max_grad_norm):
    settings = {"alpha": 30.0, "beta": 0.02, "max_grad_norm": max_grad_norm}
    ours, twin = build("mlp"), build("mlp")
    with torch.no_grad():
        ours[0].weight[0, :3] = twin[0].weight[0, :3] = 0.0
    ham = HAM(optimizer_of(ours, kind), **settings)
    plain = optimizer_of(twin, kind)
    for batch in make_batches("mlp", 4):
        for model, optimizer in ((ours, ham), (twin, plain)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
        ham.step()
        step_entry_by_entry(twin, plain, **settings)
    for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ours[0].weight, build("mlp")[0].weight)


def test_a_huge_gradient_multiplies_by_at_most_e_to_the_five():
    weight = nn.Parameter(torch.tensor([[1.0, -1.0]]))
    frozen = torch.optim.SGD([weight], lr=1.0)
    ham = HAM(frozen, alpha=1e6, beta=0.0)
    weight.grad = torch.tensor([[-1.0, -1.0]])
    ham.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([[2 * math.e**5, 0.0]]))


def test_biases_get_the_step_of_the_wrapped_optimizer_alone():
    ours, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(ours.state_dict())
    optimizers = (
        HAM(torch.optim.SGD(ours.parameters(), 0.1)),
        torch.optim.SGD(twin.parameters(), 0.1),
    )
    for model, optimizer in zip((ours, twin), optimizers, strict=True):
        model(torch.ones(4, 3)).square().sum().mul(0.01).backward()
        optimizer.step()
    assert torch.equal(ours.bias, twin.bias)
    assert not torch.equal(ours.weight, twin.weight)


def test_a_scheduler_and_a_checkpoint_work_as_with_the_wrapped_optimizer():
    batches = make_batches("mlp", 6)

    def begin():
        model = build("mlp")
        ham = HAM(optimizer_of(model, "sgd"))
        return model, ham, torch.optim.lr_scheduler.ExponentialLR(ham, 0.5)

    def go(model, ham, scheduler, batches):
        for batch in batches:
            train(model, ham, [batch])
            scheduler.step()

    whole = begin()
    go(*whole, batches)
    half = begin()
    go(*half, batches[:3])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in half], file)
    file.seek(0)
    resumed = begin()
    for part, state in zip(resumed, torch.load(file), strict=True):
        part.load_state_dict(state)
    go(*resumed, batches[3:])
    assert resumed[1].param_groups[0]["lr"] == 0.1 * 0.5**6
    for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_closure_is_evaluated_and_its_loss_returned():
    model, batch = build("mlp"), make_batches("mlp", 1)[0]
    twin = copy.deepcopy(model)
    ham, other = HAM(optimizer_of(model, "sgd")), HAM(optimizer_of(twin, "sgd"))

    def closure():
        ham.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    loss = ham.step(closure)
    train(twin, other, [batch])
    assert torch.equal(loss, loss_of(build("mlp"), batch))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["probmask-tied", "probmask", "rigl", "ac-dc", "feather"])
def test_methods_end_at_their_budget_with_it(name):
    model = build("mlp")
    optimizer = HAM(optimizer_of(model, "sgd"))
    method = probmask.methods.METHODS[name](sparsity=0.8)
    sparsifier = probmask.attach(
        model, method, optimizer=optimizer, total_steps=12, steps_per_epoch=3, seed=1
    )
    train(model, optimizer, make_batches("mlp", 12), sparsifier)
    assert sparsifier.now.step == 12
    size = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert sparsifier.finalize().kept == size - round(0.8 * size)


def test_the_default_method_treats_it_as_the_optimizer_that_it_wraps():
    """Initial values fade out with SGD only."""
    forgotten = {}
    for kind in ("sgd", "adamw"):
        model = build("conv")
        optimizer = HAM(optimizer_of(model, kind))
        sparsifier = probmask.attach(
            model, probmask.TiedProbMask(sparsity=0.5), optimizer=optimizer, total_steps=4
        )
        train(model, optimizer, make_batches("conv", 4))
        forgotten[kind] = sparsifier.metrics()["forgotten"]
    assert forgotten == {"sgd": 1.0, "adamw": 0.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "sgd"}, r"HAM\(optimizer=str\): not a torch\.optim\.Optimizer"),
        ({"optimizer": HAM(torch.optim.SGD([nn.Parameter(torch.ones(1))]))}, "already has"),
        ({"alpha": -1}, r"HAM\(alpha=-1\)"),
        ({"beta": math.nan}, r"HAM\(beta=nan\)"),
        ({"max_grad_norm": "20"}, r"HAM\(max_grad_norm='20'\)"),
    ],
)
def test_wrong_arguments_raise(arguments, message):
    given = {"optimizer": optimizer_of(build("mlp"), "sgd")} | arguments
    with pytest.raises(probmask.InputError, match=message):
        HAM(given.pop("optimizer"), **given)
