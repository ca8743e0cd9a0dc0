"""torch.compile: the same training, compiled a bounded number of times."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import probmask
from reference.networks import build, loss_of, make_batches, sgd, state_of
from reference.probmask_run import method_of

STEPS = 16  # frozen by the 12th update

# Importing the compiler causes warnings that are not related to this package.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attached(name, form, **settings):
    model = build(name)
    optimizer = sgd(model)
    settings = {"sparsity": 0.7, "min_keep_per_layer": 2, "freeze_at": 0.6} | settings
    sparsifier = probmask.attach(
        model,
        method_of(form, **settings),
        optimizer=optimizer,
        total_steps=STEPS,
        seed=1,
    )
    return model, optimizer, sparsifier


def train(network, optimizer, sparsifier, batches):
    for batch in batches:
        optimizer.zero_grad()
        for share in sparsifier.draws():
            (share * loss_of(network, batch)).backward()
        optimizer.step()


def assert_close(model, other, tolerance):
    expected = state_of(other)
    for name, value in state_of(model).items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["mlp", "unet", "tied", "transformer"])
def test_training_is_compiled_once_per_phase(form, name):
    """Before and after the freeze; discounts begin after the first update and end before it."""
    for discount in (0.0, 1.0) if form == "tied" else (None,):
        settings = {} if discount is None else {"discount": discount}
        plain, compiled_ = attached(name, form, **settings), attached(name, form, **settings)
        batches = make_batches(name, STEPS)
        counter = CompileCounterWithBackend("aot_eager")
        network = torch.compile(compiled_[0], backend=counter, fullgraph=True)
        train(network, *compiled_[1:], batches[:8])
        assert counter.frame_count == (2 if discount else 1)
        train(network, *compiled_[1:], batches[8:])
        assert counter.frame_count == (3 if discount else 2)
        train(plain[0], *plain[1:], batches)
        assert_close(compiled_[0], plain[0], 1e-5)
        assert compiled_[2].finalize() == plain[2].finalize()


def test_several_draws_do_not_recompile():
    model, optimizer, sparsifier = attached("mlp", "learned", draws=2)
    counter = CompileCounterWithBackend("aot_eager")
    network = torch.compile(model, backend=counter, fullgraph=True)
    train(network, optimizer, sparsifier, make_batches("mlp", 8))
    assert counter.frame_count == 1


@pytest.mark.parametrize("fullgraph", [True, False])
def test_evaluation_follows_every_update_and_compiles_once(form, fullgraph):
    model, optimizer, sparsifier = attached("mlp", form, freeze_at=1)
    counter = CompileCounterWithBackend("aot_eager")
    network = torch.compile(model, backend=counter, fullgraph=fullgraph)
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    for batch in make_batches("mlp", STEPS - 1):  # the last update would freeze tied masks
        network.train()
        train(network, optimizer, sparsifier, [batch])
        network.eval()
        with torch.no_grad():
            torch.testing.assert_close(network(inputs), model(inputs), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2


def test_compiled_in_place(form):
    plain, (model, optimizer, sparsifier) = attached("mlp", form), attached("mlp", form)
    batches = make_batches("mlp", STEPS)
    model.compile(backend="aot_eager", fullgraph=True)
    train(model, optimizer, sparsifier, batches)
    train(plain[0], *plain[1:], batches)
    assert_close(model, plain[0], 1e-5)


def test_compiled_before_attach(form):
    model = build("mlp")
    network = torch.compile(model, backend="aot_eager")
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    network(inputs)
    optimizer = sgd(network)
    sparsifier = probmask.attach(
        network,
        method_of(form, freeze_at=0.6, sparsity=0.7, min_keep_per_layer=2),
        optimizer=optimizer,
        total_steps=STEPS,
        seed=1,
    )
    batches = make_batches("mlp", STEPS)
    train(network, optimizer, sparsifier, batches)
    plain = attached("mlp", form)
    train(plain[0], *plain[1:], batches)
    assert_close(model, plain[0], 1e-5)
    assert sparsifier.finalize().kept == 400 - round(0.7 * 400)
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(inputs), model(inputs))


def test_the_finished_network_compiles_to_the_sparse_one(form):
    model, optimizer, sparsifier = attached("mlp", form)
    network = torch.compile(model, backend="aot_eager")
    train(network, optimizer, sparsifier, make_batches("mlp", STEPS))
    inputs = make_batches("mlp", 1, seed=9)[0][0]
    network.eval()
    before = network(inputs)
    sparsifier.finalize()
    torch.testing.assert_close(network(inputs), before, rtol=1e-5, atol=1e-6)


def test_the_real_compiler(form):
    """Inductor, in training and in evaluation, for one small network."""
    plain, (model, optimizer, sparsifier) = attached("mlp", form), attached("mlp", form)
    batches = make_batches("mlp", 6)
    network = torch.compile(model)
    train(network, optimizer, sparsifier, batches)
    train(plain[0], *plain[1:], batches)
    assert_close(model, plain[0], 1e-3)
    inputs = batches[0][0]
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(inputs), model(inputs), rtol=1e-4, atol=1e-5)
