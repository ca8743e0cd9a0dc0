"""AC/DC: when the network is sparse and when dense, and what happens in between."""

import pytest
import torch

from probmask import InputError
from probmask.methods.ac_dc import ACDC
from reference.masked_run import SIZE, MaskedRun, assert_exact_budget, assert_resumes, joined

KEEP = 61


def spans(method, steps=100):
    """Where the network is compressed, as pairs of percentages."""
    states = [False, *(method.compressed_at(done / steps) for done in range(steps)), False]
    edges = [i for i in range(steps + 1) if states[i] != states[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def test_the_schedule_is_the_papers_for_imagenet():
    sparse = [(begin, begin + 5) for begin in range(10, 75, 10)]
    assert spans(ACDC(sparsity=0.9)) == [*sparse, (85, 100)]


def test_other_schedules():
    method = ACDC(sparsity=0.9, warm_up=0.05, period=0.1, last_dense=0.0, last_sparse=0.15)
    assert spans(method) == [(5, 15), (25, 35), (45, 55), (65, 75), (85, 100)]
    method = ACDC(sparsity=0.9, warm_up=0.0, period=0.5, last_dense=0.0, last_sparse=0.0)
    assert spans(method) == [(0, 50)]


def test_compression_keeps_the_largest_weights_and_zeroes_the_others():
    run = MaskedRun(ACDC(sparsity=0.8, warm_up=0.25, period=0.25)).go(5)
    before = [weight.detach().clone() for weight in run.weights]
    assert joined(run.weights).count_nonzero() == SIZE
    run.go(6)  # 0.25 of the training is done
    values = joined(run.weights).abs()
    assert int(values.count_nonzero()) == KEEP
    chosen = [mask.active.clone() for mask in run.masked]
    assert sum(int(active.sum()) for active in chosen) == KEEP
    for until in range(7, 12):
        run.go(until)
        for weight, active in zip(run.weights, chosen, strict=True):
            assert torch.equal(weight != 0, active)
    assert before[0].count_nonzero() == before[0].numel()


def test_decompression_starts_pruned_weights_from_zero_and_resets_momentum():
    run = MaskedRun(ACDC(sparsity=0.8, warm_up=0.25, period=0.25)).go(11)
    assert any(
        bool(run.optimizer.state[p]["momentum_buffer"].any()) for p in run.model.parameters()
    )
    run.go(12)
    assert int(joined(run.weights).count_nonzero()) == KEEP
    assert all(bool(mask.active.all()) for mask in run.masked)
    for parameter in run.model.parameters():
        assert not run.optimizer.state[parameter]["momentum_buffer"].any()
    run.go(13)
    assert int(joined(run.weights).count_nonzero()) > 2 * KEEP


def test_momentum_of_kept_weights_can_be_preserved():
    run = MaskedRun(ACDC(sparsity=0.8, warm_up=0.25, period=0.25, restart_momentum=False)).go(11)
    active = [mask.active.clone() for mask in run.masked]
    run.go(12)
    moments = [run.optimizer.state[weight]["momentum_buffer"] for weight in run.weights]
    assert all(not m[~a].any() for m, a in zip(moments, active, strict=True))
    assert any(m[a].any() for m, a in zip(moments, active, strict=True))


def test_layers_can_have_the_same_fraction():
    method = ACDC(sparsity=0.75, scope="layer")
    assert [layer.kept for layer in assert_exact_budget(method).layers] == [18, 36, 16, 6]


def test_no_warm_up_and_no_final_sparse_phase():
    method = ACDC(sparsity=0.8, warm_up=0.0, last_sparse=0.0)
    assert_exact_budget(method)
    assert_resumes(method)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scope": "all"}, "ACDC(scope='all'): must be one of 'global', 'layer'."),
        ({"period": 0}, "ACDC(period=0): must be a fraction of the training, from 1e-06 to 1."),
        ({"warm_up": 10}, "ACDC(warm_up=10): must be a fraction of the training, from 0 to 1."),
        (
            {"warm_up": 0.9},
            "ACDC(warm_up=0.9, last_dense=0.1, last_sparse=0.15): their sum is 1.15, but",
        ),
        ({"restart_momentum": 2}, "ACDC(restart_momentum=2): must be one of True, False."),
    ],
)
def test_invalid_settings_raise(settings, text):
    with pytest.raises(InputError) as caught:
        ACDC(**({"sparsity": 0.9} | settings))
    assert text in str(caught.value)
