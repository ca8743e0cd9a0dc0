"""Contracts that every method meets; see CONTRIBUTING.md."""

import copy

import pytest
import torch

import probmask
from contracts.training import (
    KEEP,
    NAMES,
    NETWORKS,
    SIZE,
    SPARSITY,
    STEPS,
    TWO_RANKS,
    WITHOUT_NOISE,
    Run,
    batches,
    budget,
    network,
    train_all,
    train_parts,
)
from probmask.methods import METHODS
from reference import two_ranks

SPARSE = sorted(set(NAMES) - {"dense"})
# Its weights are never trained, so it never equals dense training.
NEVER_DENSE = {"edge-popup"}
# Grown weights are zero until a gradient moves them.
GROWING = {"deepr", "dsr", "granet", "rigl", "set", "snfs"}


def differing(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def finished():
    """Return a cached function that gives each method's uninterrupted run on each network."""
    made = {}

    def of(name, kind="plain"):
        if (name, kind) not in made:
            run = Run(name, kind=kind).go(STEPS)
            masks = run.sparsifier.masks
            made[name, kind] = (run, run.finish(), masks)
        return made[name, kind]

    return of


on_each_network = pytest.mark.parametrize("kind", NETWORKS)


@on_each_network
@pytest.mark.parametrize("name", SPARSE)
def test_the_budget_is_exact(name, kind, finished):
    run, final, masks = finished(name, kind)
    keep, size = budget(kind)
    assert sum(int(mask.sum()) for mask in masks.values()) == keep
    kept = sum(int(final[layer.name].count_nonzero()) for layer in run.summary.layers)
    assert (run.summary.kept, run.summary.size) == (keep, size)
    assert kept <= keep
    if name not in GROWING:
        assert kept >= keep - 3  # a kept weight may happen to be zero


@on_each_network
@pytest.mark.parametrize("name", NAMES)
def test_finalize_leaves_a_plain_model(name, kind, finished):
    run, final, _ = finished(name, kind)
    plain = network(kind)
    assert list(final) == list(plain.state_dict())
    assert [type(module) for module in run.model.modules()] == [type(m) for m in plain.modules()]
    assert all(torch.isfinite(value).all() for value in final.values())
    assert all(not module._forward_hooks for module in run.model.modules())


@on_each_network
@pytest.mark.parametrize("name", NAMES)
def test_the_exported_network_is_the_masked_dense_one(name, kind, finished, tmp_path):
    run, final, masks = finished(name, kind)
    for site, mask in masks.items():
        assert torch.equal(final[site], torch.where(mask, final[site], 0.0))
    run.model.load_state_dict(final)
    probmask.save(run.model, tmp_path / "model.safetensors")
    loaded = network(kind)
    probmask.load_into(loaded, tmp_path / "model.safetensors")
    assert differing(final, loaded.state_dict()) == []
    images, _ = batches(1, seed=9)[0]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(images), run.model.eval()(images))


@pytest.mark.parametrize("name", NAMES)
def test_the_state_dict_of_a_training_is_that_of_a_plain_model(name):
    run = Run(name, kind="batchnorm").go(STEPS // 2)
    plain = network("batchnorm")
    plain.load_state_dict(run.model.state_dict())
    run.model.load_state_dict(plain.state_dict())
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in run.model.named_parameters()] == names


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bits(name, finished):
    assert differing(finished(name)[1], Run(name).finish()) == []


@on_each_network
@pytest.mark.parametrize("name", NAMES)
def test_it_resumes_bit_for_bit_in_every_phase(name, kind, finished):
    ends = finished(name, kind)[0].sparsifier.phase_ends
    begins = (0, *ends[:-1])
    middles = {(begin + end) // 2 for begin, end in zip(begins, ends, strict=True)}
    stops = sorted({1, 3 * STEPS // 4, STEPS - 1, *middles, *ends[:-1]})
    if kind == "recurrent":  # the phases are those of the method, so one moment suffices
        stops = [STEPS // 2]
    run = Run(name, kind=kind)
    states = [run.go(stop).checkpoint() for stop in stops]
    for index, (stop, state) in enumerate(zip(stops, states, strict=True)):
        resumed = Run(name, seed=99, kind=kind).restore(state, model_first=index % 2 == 0).finish()
        assert differing(finished(name, kind)[1], resumed) == [], f"resumed after {stop} updates"


@pytest.mark.parametrize("name", NAMES)
def test_weights_loaded_before_attach_are_kept_or_refused(name, finished):
    state = Run(name).go(STEPS // 2).checkpoint()
    resumed = Run(name, seed=99, start=state["model"])
    changed = differing(state["model"], resumed.model.state_dict())
    resumed.restore({**state, "model": resumed.model.state_dict()})
    if not changed:
        assert differing(finished(name)[1], resumed.finish()) == []
        return
    if not any(site.weight.requires_grad for site in resumed.sparsifier.sites):
        return  # a supermask: the seed decides about its weights
    for end in (resumed.finish, resumed.sparsifier.finalize):
        with pytest.raises(probmask.InputError, match=r"Load the model's state_dict after attach"):
            end()
        resumed.sparsifier.load_state_dict(state["sparsifier"])
    resumed.model.load_state_dict(state["model"])
    assert differing(finished(name)[1], resumed.finish()) == []


@pytest.mark.parametrize("name", sorted(set(SPARSE) - NEVER_DENSE))
def test_sparsity_zero_is_dense_training(name):
    dense = Run("dense").finish()
    assert differing(dense, Run(name, sparsity=0.0).finish()) == []


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_ends_at_the_budget_too(name):
    run = Run(name, steps=16, dtype=torch.bfloat16).go(8)
    trained = [p for masked in run.sparsifier._masker.masked for p in masked.parameters()]
    assert {p.dtype for p in trained} <= {torch.float32}  # in bf16 they could not take small steps
    final = run.finish()
    assert run.summary.kept == (SIZE if name == "dense" else KEEP)
    assert {value.dtype for value in final.values()} == {torch.bfloat16}
    assert all(torch.isfinite(value).all() for value in final.values())


@pytest.mark.parametrize("name", NAMES)
def test_training_may_end_after_any_update(name):
    run = Run(name).go(STEPS // 3)
    run.data = run.data[: STEPS // 3]
    run.finish()
    assert run.summary.kept == (SIZE if name == "dense" else KEEP)


@on_each_network
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_the_same_network(name, kind):
    run = Run(name, kind=kind).go(STEPS // 2)
    twin = copy.deepcopy(run.model).eval()
    images, _ = batches(1, seed=9)[0]
    with torch.no_grad():
        assert torch.equal(run.model.eval()(images), twin(images))


@pytest.mark.parametrize("name", SPARSE)
def test_evaluation_equals_the_network_after_finalize(name):
    run = Run(name).go(STEPS // 2)
    images, _ = batches(1, seed=9)[0]
    with torch.no_grad():
        before = run.model.eval()(images)
        run.model.train()
        run.data = run.data[: STEPS // 2]
        run.finish()
        assert torch.allclose(before, run.model.eval()(images), atol=1e-5)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return two_ranks.run(train_all, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), TWO_RANKS)
def test_two_ranks_agree_on_the_exact_budget(name, kind, ranks):
    (first, kept), (second, others) = (found[name, kind] for found in ranks)
    assert differing(first, second) == []
    keep, size = budget(kind)
    assert kept == others == (size if name == "dense" else keep)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_end_where_one_process_with_accumulated_gradients_ends(count, tmp_path):
    """The same masks; weights agree to rounding, because gradients are summed in another order."""
    first, *others = two_ranks.run(train_parts, tmp_path, ranks=count)
    for name in WITHOUT_NOISE:
        expected = Run(name, steps=16, data=batches(16), pieces=count).finish()
        for other in others:
            assert differing(first[name], other[name]) == [], name
        for key, value in expected.items():
            assert torch.equal(first[name][key] != 0, value != 0), (name, key)
            torch.testing.assert_close(
                first[name][key], value, rtol=1e-4, atol=1e-5, msg=f"{name}, {key}"
            )


def test_sparsity_and_name_match_the_command_line():
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
        assert method.group in (
            "ours",
            "compared in the paper",
            "discussed in the paper",
            "newer rivals",
            "baselines",
        )
        if name != "dense":
            assert method(sparsity=SPARSITY).sparsity == SPARSITY
