"""The engine: calls, choices, errors and the table of `explain`."""

import json
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune

import probmask
from probmask import InputError, models
from probmask.runtime.plan.partition import Timing, choose_sparse, choose_ungrouped, steps_of
from probmask.runtime.run.engine import EngineModule
from probmask.runtime.run.profile import print_table
from runtime.comparing import assert_same
from runtime.networks import masked


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return masked(models.resnet14(width=8), 0.9)


@pytest.fixture(scope="module")
def engine(model):
    return probmask.runtime.compile(model, torch.randn(2, 3, 32, 32), threads=1)


def test_the_engine_copies_the_weights(model):
    changing = models.smallconv(width=8).train()
    x = torch.randn(2, 1, 8, 8)
    engine = probmask.runtime.compile(changing, x, layers="sparse")
    assert changing.training
    before = engine(x)
    with torch.no_grad():
        for parameter in changing.parameters():
            parameter.zero_()
    torch.testing.assert_close(engine(x), before, rtol=0, atol=0)


def test_concurrent_calls_are_independent(model):
    engine = probmask.runtime.compile(model, torch.randn(2, 3, 32, 32), threads=2, layers="sparse")
    inputs = [torch.randn(batch, 3, 32, 32) for batch in (1, 3, 5, 16, 1, 7)]
    expected = [engine(x) for x in inputs]
    wrong = []

    def work(k):
        same = [torch.equal(engine(inputs[k]), expected[k]) for _ in range(10)]
        wrong.extend([k] if not all(same) else [])

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_steps_alternate_between_kernels_and_pytorch():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            y = self.a(x).relu()
            return self.b(torch.cumsum(y, 2) * 0.1) + y, y.sum()

    model = masked(Mixed(), 0.5)
    x = torch.randn(3, 3, 9, 9)
    engine = probmask.runtime.compile(model, x, layers="sparse")
    kinds = [step.sparse for step in steps_of(engine.network, set(engine.choices.sparse))]
    assert kinds == [True, False, True] or kinds == [True, False, True, False]
    with torch.no_grad():
        torch.testing.assert_close(engine(x), model(x))


def test_explain_prints_where_each_node_runs_and_why(engine, capsys):
    rows = engine.describe()
    assert [row["node"] for row in rows] == [node.name for node in engine.network.nodes]
    assert {row["runs"] for row in rows} <= {"kernels", "PyTorch"}
    assert all(row["why"] for row in rows)
    engine.explain()
    printed = capsys.readouterr().out
    assert "stages.0.0.body.0 (conv2d.default)" in printed
    assert "compiled in" in printed


@pytest.mark.parametrize(
    ("kernels", "call", "shown", "in_all"),
    [
        (0.00031, 0.002, ("kernels µs", "0.31", "4.20", "1.69"), "2.00 µs per call; 4.20 µs for"),
        (2.5, 3.0, ("kernels ms", "2.500", "0.004", "0.500"), "3.000 ms per call; 0.004 ms for"),
    ],
)
def test_small_networks_are_explained_in_microseconds(kernels, call, shown, in_all, capsys):
    """The rest of a call is a row of its own."""
    row = {"layer": "fc", "output": "4", "density": 0.5, "runs": "kernels", "why": "faster"}
    print_table([{**row, "kernels_ms": kernels, "pytorch_ms": 0.0042}], call, 0.1, 1)
    printed = capsys.readouterr().out
    assert all(cell in printed for cell in shown)
    assert in_all in printed


def test_choices_are_saved_and_used_again(engine, model, tmp_path):
    path = tmp_path / "choices.json"
    engine.choices.save(path)
    with pytest.raises(InputError, match="exists"):
        engine.choices.save(path)
    x = torch.randn(2, 3, 32, 32)
    again = probmask.runtime.compile(model, x, threads=1, choices=path)
    assert again.choices == engine.choices
    torch.testing.assert_close(again(x), engine(x), rtol=0, atol=0)
    other = models.smallconv(width=8)
    with pytest.raises(InputError, match="another network"):
        probmask.runtime.compile(other, torch.randn(2, 1, 8, 8), choices=path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor": "abacus"}))
    with pytest.raises(InputError, match="measured on abacus"):
        probmask.runtime.compile(model, x, choices=path)
    path.write_text("[]")
    with pytest.raises(InputError, match=r"not a file that Engine\.choices\.save wrote"):
        probmask.runtime.compile(model, x, choices=path)


def test_the_cheapest_path_includes_crossings(engine):
    """Avoiding a slightly slower layer is not worth two crossings; avoiding a slow one is."""
    names = [node.name for node in engine.network.nodes]
    fast = dict.fromkeys(names, Timing(1e-6, None, 1e-3))
    assert choose_sparse(engine.network, fast) == set(names)
    slow = dict.fromkeys(names, Timing(1e-3, None, 1e-6))
    assert choose_sparse(engine.network, slow) == set()
    one_slower = {**fast, names[5]: Timing(2e-6, None, 1e-6)}
    assert choose_sparse(engine.network, one_slower) == set(names)
    one_bad = {**fast, names[5]: Timing(1.0, None, 1e-6)}
    assert choose_sparse(engine.network, one_bad) == set(names) - {names[5]}


def test_groups_start_where_they_are_faster(engine):
    (step,) = steps_of(engine.network, {node.name for node in engine.network.nodes})
    last = len(step.nodes) - 2
    timings = {
        node.name: Timing(2.0, 3.0 if i < last else 1.0, 9.0) for i, node in enumerate(step.nodes)
    }
    assert choose_ungrouped(step, timings) == last


FITTING = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def fake(shape):
    with FakeTensorMode():
        return torch.empty(shape)


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (torch.zeros(2, 3, 32, 31), "2×3×32×31 float32 on cpu"),
        (torch.zeros(3, 32, 32), "3×32×32 float32 on cpu"),
        (FITTING.double(), "2×3×32×32 float64 on cpu"),
        (FITTING.to("meta"), "2×3×32×32 float32 on meta"),
        (fake((2, 3, 32, 32)), "a FakeTensor of 2×3×32×32 float32"),
        (FITTING.to_sparse(), "a tensor of 2×3×32×32 float32 in the layout sparse_coo; call"),
        (FITTING.to_mkldnn(), "a tensor of 2×3×32×32 float32 in the layout _mkldnn; call"),
        (FITTING.numpy().astype(np.float16), "an array of 2×3×32×32 float16"),
        (np.array(["text", None]), "an array of 2 object"),
        (np.ma.masked_array(FITTING.numpy(), mask=True), "a masked array"),
        (None, "None"),
        ("text", "an object of type str"),
        (FITTING.tolist(), "an object of type list"),
        ((FITTING,), "an object of type tuple"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_do_not_fit_raise(engine, x, found):
    engine(FITTING)  # inputs like those of the last call are checked in another way
    expected = re.escape(f"takes images of N×3×32×32 float32 on the CPU, not {found}")
    with pytest.raises(InputError, match=expected):
        engine(x)
    assert not engine.takes(x)
    with pytest.raises(InputError, match=r"network takes|the example is"):
        engine.tuned_for((x,))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_calls_that_an_engine_cannot_serve_raise(engine):
    fresh = probmask.runtime.compile(nn.Linear(32, 2), FITTING, threads=1, layers="sparse")
    with pytest.raises(InputError, match="the network takes 1 input, not 0"):
        fresh()
    with pytest.raises(InputError, match="the network takes 1 input, not 2"):
        engine(FITTING, FITTING)
    assert not engine(FITTING).requires_grad
    with pytest.raises(InputError, match=r"images requires a gradient.* torch\.no_grad\(\)"):
        engine(FITTING.clone().requires_grad_())
    with torch.no_grad():
        engine(FITTING.clone().requires_grad_())
    engine(FITTING[:1])
    with pytest.raises(InputError, match=r"not a tensor inside torch\.func or vmap"):
        torch.vmap(lambda image: engine(image[None]))(FITTING)
    engine(FITTING)
    with pytest.raises(InputError, match="trace the model instead"):
        torch.jit.trace(EngineModule(engine), FITTING)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.numpy().astype(">f4"),
        lambda x: x.flip(-1).numpy()[..., ::-1],
        lambda x: np.asfortranarray(x.numpy()),
        lambda x: torch._neg_view(-x),
        lambda x: x.to(memory_format=torch.channels_last),
        nn.Parameter,
    ],
    ids=["big-endian", "reversed", "fortran", "negative view", "channels last", "parameter"],
)
def test_the_representation_of_an_input_does_not_matter(convert):
    engine = probmask.runtime.compile(nn.Linear(32, 2), FITTING, threads=1, layers="sparse")
    with torch.no_grad():
        found = torch.as_tensor(engine(convert(FITTING)))
    assert torch.equal(found, engine(FITTING))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_reparametrized_weights_are_computed_or_refused():
    x = torch.randn(2, 3)
    pruned = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    for layer in pruned:
        prune.l1_unstructured(layer, "weight", amount=0.5)
    with pytest.raises(InputError, match=r"utils\.prune still masks 0\.weight .*prune\.remove"):
        probmask.runtime.compile(pruned, x)
    for layer in pruned:
        prune.remove(layer, "weight")
    with pytest.raises(InputError, match=r"cannot be copied: .*remove_weight_norm"):
        probmask.runtime.compile(nn.utils.weight_norm(nn.Linear(3, 3)), x)
    for model in (pruned, nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))):
        assert_same(model, x)


def test_a_network_with_a_fixed_batch_size_rejects_others(caplog):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).reshape(3, 2, 2)

    engine = probmask.runtime.compile(Fixed(), torch.zeros(3, 4), layers="sparse")
    assert engine(torch.ones(3, 4)).shape == (3, 2, 2)
    ours = [record.levelname for record in caplog.records if record.name == "probmask"]
    assert ours == ["WARNING"]
    assert "reshape(3, 2, 2)" in caplog.text
    message = r"takes x of 3×4 .*, not 2×4.* fixes the batch size at 3 \(.*reshape\(3, 2, 2\)"
    with pytest.raises(InputError, match=message):
        engine(torch.ones(2, 4))


def doubled_if(is_doubled):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * 2 if is_doubled(x) else self.linear(x)

    return Branches().eval()


@pytest.mark.parametrize(
    "is_doubled",
    [lambda x: len(x) > 3, lambda x: x.shape[0] % 2 == 1, lambda x: x.size(0) == 5],
    ids=["more", "odd", "equal"],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_branches_on_the_batch_size_fix_it(is_doubled, batch, caplog):
    """The exported program has one branch, so other batch sizes would be wrong."""
    model = doubled_if(is_doubled)
    x = torch.randn(batch, 4)
    engine = probmask.runtime.compile(model, x, layers="sparse", threads=1)
    torch.testing.assert_close(engine(x), model(x))
    assert f"fixes the batch size at {batch} (test_engine.py, line " in caplog.text
    with pytest.raises(InputError, match=f"fixes the batch size at {batch} "):
        engine(torch.randn(5, 4))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_branch_for_a_batch_of_one_fixes_the_batch_size(batch, caplog):
    """`torch.export` says nothing about it."""
    model = doubled_if(lambda x: len(x) == 1)
    x = torch.randn(batch, 4)
    engine = probmask.runtime.compile(model, x, layers="sparse", threads=1)
    torch.testing.assert_close(engine(x), model(x))
    assert f"fixes the batch size at {batch} (a branch that" in caplog.text
    with pytest.raises(InputError, match=f"fixes the batch size at {batch} "):
        engine(torch.randn(4 - batch, 4))


def test_branches_on_values_raise_one_error(caplog, capfd):
    with pytest.raises(InputError, match=r"depends on the values of a tensor \(test_engine\.py"):
        probmask.runtime.compile(doubled_if(lambda x: x.sum() > 0), torch.randn(2, 4))
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_ignored(model, default):
    x = torch.randn(3, 3, 32, 32)
    engine = probmask.runtime.compile(model, x, threads=1, layers="sparse")
    expected = engine(x)
    torch.set_default_dtype(default)
    try:
        found = engine(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
