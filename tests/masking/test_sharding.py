"""FSDP2 divides weights, masks and probabilities among ranks; the network is that of one rank."""

import re
import sys

import pytest
import torch

import probmask
from reference import sharded_ranks, two_ranks
from reference.sharded_ranks import METHODS, STEPS, build, restored, result_of, state_of, update

SIZE = 9 * 6 + 7 * 9 + 3 * 7
KEEP = SIZE - round(0.8 * SIZE)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(f"ranks{request.param}")
    return two_ranks.run(sharded_ranks.train_in_every_order, directory, ranks=request.param)


@pytest.fixture(scope="module")
def alone():
    return {name: result_of(name) for name in METHODS}


def close(one, other, atol):
    assert one.keys() == other.keys()
    return all(torch.allclose(one[key], other[key], rtol=1e-4, atol=atol) for key in one)


@pytest.mark.parametrize("name", METHODS)
def test_attach_works_before_and_after_fully_shard(ranks, alone, name):
    """With HSDP too, on four ranks. Sums are rounded in another order than on one rank."""
    expected = alone[name]
    atol = 1e-3 if name == "tied" else 2e-5
    for found in ranks:
        for order in ("before", "after", "compiled", "hsdp"):
            if (name, order) not in found:
                continue
            result = found[name, order]
            assert result["kept"] == expected["kept"] == KEEP
            assert result["layers"] == expected["layers"]
            for site, mask in expected["masks"].items():
                assert torch.equal(result["masks"][site], mask)
            assert close(result["weights"], expected["weights"], atol)
            assert close(result["final"], expected["final"], atol)
            assert torch.allclose(result["outputs"], expected["outputs"], atol=20 * atol)
            for site, values in zip(result["trained"], expected["trained"], strict=True):
                for value, wanted in zip(site, values, strict=True):
                    assert torch.allclose(value, wanted, atol=2e-5)


def test_every_rank_has_the_same_result(ranks):
    for key, result in ranks[0].items():
        if key in ("refused", "sent"):
            continue
        for other in ranks[1:]:
            assert all(torch.equal(v, other[key]["final"][k]) for k, v in result["final"].items())


def test_finalize_leaves_the_classes_of_fully_shard(ranks):
    kinds = ["FSDPSequential", "FSDPLinear", "ReLU", "Linear", "ReLU", "Linear"]
    assert ranks[0]["tied", "before"]["kinds"] == kinds
    assert ranks[0]["tied", "after"]["kinds"] == kinds


def test_gradients_of_several_backward_passes_are_added(ranks, alone):
    result = ranks[0]["probmask", "accumulated"]
    assert close(result["final"], alone["probmask"]["final"], 2e-5)


def test_weights_that_cannot_be_masked_are_refused_by_name(ranks):
    for found in ranks:
        refused = found["refused"]
        assert "0.weight is a DTensor of tensor parallelism" in refused["tensor parallel"]
        assert "2.weight is not sharded" in refused["ignored"]
        assert "cost='flops'" in refused["flops"]
        assert "it measures whole weights" in refused["snip"]
        assert "2.weight has requires_grad=False and is sharded" in refused["untrained"]
        assert "call model.reshard() before you build it" in refused["gathered"]
        assert "call sparsifier.use(optimizer)" in refused["attached before"]
        assert "0.weight is sharded; gather the weights with" in refused["saved"]
        assert "0.weight is divided by (Shard(dim=1),), not by rows" in refused["columns"]
        assert "0.weight is offloaded to the CPU" in refused["offloaded"]
        if len(ranks) == 4:
            assert "0.weight is resharded to fewer ranks" in refused["fewer ranks"]
            both = refused["tensor parallel and sharded"]
            assert "0.weight is a DTensor of tensor parallelism" in both
            assert "2.weight is sharded over other ranks" in refused["other mesh"]


def test_the_older_fsdp_is_refused_by_name(tmp_path):
    for error in two_ranks.run(sharded_ranks.refused_fsdp1, tmp_path):
        assert "FullyShardedDataParallel joins weights into flat tensors" in error


def test_replicas_of_hsdp_that_differ_are_found(tmp_path):
    """All weights of the second replica were changed by 1e-6."""
    for error in two_ranks.run(sharded_ranks.differing_replicas, tmp_path, ranks=4):
        assert re.match("after 1 updates, rank [01] differs from the other ranks in ", error)
        assert "2.weight" in error


def test_batchnorm_statistics_are_those_of_the_batches_that_all_ranks_have(tmp_path):
    """The ranks run a sharded network together, so the third batch of rank 0 is not used."""
    one, other = two_ranks.run(sharded_ranks.share_statistics, tmp_path)
    assert one["1.num_batches_tracked"] == 4
    for name, value in one.items():
        assert torch.equal(value, other[name])


def test_an_update_sends_few_small_messages(ranks):
    """The table in docs/scaling.md states these numbers."""
    histogram = 8 * (2**11 + 1)
    sites = 3
    for found in ranks:
        tied = found["sent"]["tied"]
        # The RMS of the gradients; the fading of each site; three digits of the threshold, the ties
        # and the two values next to it.
        assert tied == [16 * sites, *[8] * sites, *[histogram] * 3, 8 * sites, 8 * 4 * sites]
        learned = found["sent"]["straight"]
        assert len(learned) <= 24
        assert sum(learned) <= 4 * histogram
        assert max(found["sent"]["probmask"]) <= 2**16


def test_mixed_precision_gathers_masked_weights(tmp_path):
    for result in two_ranks.run(sharded_ranks.train_in_bf16, tmp_path):
        assert result == {"kept": KEEP, "dtype": torch.float32}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the directory of checkpoints that two ranks saved, before and after the freeze."""
    directories = {}
    for steps in (4, STEPS - 1):
        directory = tmp_path_factory.mktemp(f"saved{steps}")
        states = two_ranks.run(sharded_ranks.Save(directory, steps), directory)
        directories[directory] = states[0]
    return directories


def same(one, other):
    for part in ("weights", "masks"):
        assert one[part].keys() == other[part].keys()
        assert all(torch.equal(one[part][key], other[part][key]) for key in one[part])
    pairs = zip(one["trained"], other["trained"], strict=True)
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_a_checkpoint_of_two_ranks_loads_on_four_and_on_one(saved, tmp_path_factory):
    """Weights, masks and probabilities are the same bits; the next update is so to rounding."""
    for directory, states in saved.items():
        four = two_ranks.run(
            sharded_ranks.Load(directory), tmp_path_factory.mktemp("four"), ranks=4
        )[0]
        for name, state in states.items():
            model = build()
            sparsifier, optimizer = restored(name, directory, model)
            assert same(state_of(model, sparsifier), state)
            assert same(four[name], state)
            update(model, sparsifier, optimizer, sharded_ranks.data()[-1])
            assert close(model.state_dict(), four[name]["next"], 1e-4)


def test_a_directory_without_a_state_is_refused(saved, tmp_path):
    sparsifier = probmask.attach(build(), METHODS["tied"], total_steps=STEPS)
    with pytest.raises(probmask.InputError, match="not a directory that torch"):
        sparsifier.load_distributed(tmp_path)
    with pytest.raises(probmask.InputError, match="the checkpoint has no such key"):
        sparsifier.load_distributed(next(iter(saved)) / "tied", key="masks")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is that of Linux")
def test_probabilities_that_do_not_fit_one_rank_are_trained_on_two(tmp_path):
    """A weight, its probability, both gradients and the momentum take 20 bytes: 480 MiB in total.

    One of two ranks takes 260 MiB, with the layers that FSDP2 gathers.
    """
    job = sharded_ranks.UnderLimit(380 << 20)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (alone,) = two_ranks.run(job, tmp_path / "one", ranks=1)
    assert "allocate" in alone
    for sparsity in two_ranks.run(job, tmp_path / "two"):
        assert sparsity == pytest.approx(0.9, abs=1e-6)
