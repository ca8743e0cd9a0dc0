"""The magnitude cut: compiled and plain against a sort, with ties and odd values."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probmask.core.selection import cut_between, cut_by_magnitude
from probmask.core.selection.magnitude_cut import cut_joined
from probmask.core.selection.magnitude_search import Magnitudes, MagnitudeSearch
from probmask.core.shrinkage import Growth
from probmask.errors import NonFiniteError
from reference.selection import select_top

pytestmark = pytest.mark.usefixtures("backend")

NAMES, SCALES = ["a", "b", "c"], (1.0, 2.0, 1.0)


def check(weights, scales, keep):
    masks, threshold = cut_by_magnitude(weights, scales, keep, NAMES)
    values = [w.abs() * s for w, s in zip(weights, scales, strict=True)]
    expected = select_top(values, keep)
    assert all(torch.equal(mine, true) for mine, true in zip(masks, expected, strict=True))
    assert threshold == pytest.approx(cut_between(values, expected), rel=1e-12, abs=0)
    masks, threshold = cut_joined(values, keep)  # as on a GPU
    assert all(torch.equal(mine, true) for mine, true in zip(masks, expected, strict=True))
    assert threshold == pytest.approx(cut_between(values, expected), rel=1e-12, abs=0)


@pytest.mark.parametrize("keep", [0, 1, 2, 37, 300, 599, 600])
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (0.3, 7.0, 1.0)])
def test_it_equals_a_sort(keep, scales):
    torch.manual_seed(keep)
    check([torch.randn(10, 20), torch.randn(100), torch.randn(3, 10, 10)], scales, keep)


EQUAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40])
ANY = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.parametrize("entries", [EQUAL, ANY], ids=["equal", "any"])
def test_ties_and_extremes(entries):
    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
    @given(st.lists(st.lists(entries, min_size=1, max_size=9), min_size=3, max_size=3), st.data())
    def run(lists, data):
        weights = [torch.tensor(entries) for entries in lists]
        check(weights, (1.0,) * 3, data.draw(st.integers(0, sum(map(len, weights)))))

    run()


def test_several_threads_give_the_exact_cut():
    torch.manual_seed(0)
    weights = [torch.randn(100_000).mul(50).round() for _ in range(3)]  # many are equal
    keep = 100_001
    masks, threshold = cut_by_magnitude(weights, (1.0,) * 3, keep, NAMES)
    values = torch.cat([w.abs() for w in weights])
    order = values.argsort(descending=True, stable=True)
    assert torch.equal(torch.cat(masks).nonzero().flatten(), order[:keep].sort().values)
    assert threshold == float(values[order[keep]])


def misleading(count):
    """Return values that are small where the sample looks, and large elsewhere."""
    weight = torch.randn(count)
    weight[: count // 64 * 64].view(-1, 64)[::2] *= 1e-3
    return weight


LARGE = {
    "normal": torch.randn,
    "heavy tails": lambda count: torch.randn(count) ** 9,
    "misleading": misleading,
    "equal but one": lambda count: torch.ones(count).index_fill_(0, torch.tensor([7]), 2.0),
    "zero": torch.zeros,
    "tiny": lambda count: 1e-40 * torch.randn(count),
    "largest": lambda count: torch.randn(count).clamp(-1, 1) * torch.finfo(torch.float32).max,
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("keep", [1, 3000, 60_000, 139_999])
def test_the_cut_is_exact_even_if_the_sample_misleads(name, keep):
    torch.manual_seed(0)
    weights = [LARGE[name](count) for count in (100_000, 37, 39_963)]
    masks, threshold = cut_by_magnitude(weights, (1.0,) * 3, keep, NAMES)
    values = torch.cat([w.abs() for w in weights])
    order = values.argsort(descending=True, stable=True)
    assert torch.equal(torch.cat(masks).nonzero().flatten(), order[:keep].sort().values)
    kept, pruned = (float(values[order[k]]) for k in (keep - 1, keep))
    assert threshold == pytest.approx(pruned + keep / 140_000 * (kept - pruned), rel=1e-12, abs=0)
    for near in (threshold, 1.01 * threshold, 1e-30, 1e30, math.inf, math.nan):
        again, same = cut_by_magnitude(weights, (1.0,) * 3, keep, NAMES, near=near)
        assert same == threshold
        assert all(map(torch.equal, again, masks))


def test_a_good_prediction_needs_no_sample(monkeypatch):
    kernels = pytest.importorskip("probmask.core.selection.magnitude_kernels")
    torch.manual_seed(0)
    weights = [torch.randn(100_000)]
    _, threshold = cut_by_magnitude(weights, (1.0,), 3000, NAMES[:1])
    monkeypatch.setattr(MagnitudeSearch, "_sample", None)
    for near in (threshold, 1.001 * threshold):
        search = MagnitudeSearch(kernels, [Magnitudes(kernels, weights[0], 1.0)])
        assert search.masks(3000, near=near)[1] == threshold


@pytest.mark.parametrize("power", [2.0, 3.0])
@pytest.mark.parametrize("moved", [0.0, 1e-3, 0.3])
@pytest.mark.parametrize("fraction", [0.0, 0.9, 1.0])
def test_growths_are_cut_like_the_tensors_of_their_values(fraction, moved, power):
    """Where nothing has moved, c = 1 leaves only ties; small moves are far below the weights."""
    torch.manual_seed(0)
    shapes = [(100, 200), (40, 30, 3, 3), (37,)]
    starts = [torch.randn(shape) for shape in shapes]
    weights = [start + moved * torch.randn(start.shape) for start in starts]
    weights[1] = weights[1].contiguous(memory_format=torch.channels_last)
    pair = torch.tensor(fraction), torch.tensor(power)
    growths = [Growth(starts[0], *pair), Growth(starts[1], *pair), None]
    values = [w if each is None else each(w) for w, each in zip(weights, growths, strict=True)]
    for keep in (1, 600, 15_000, 30_000):
        expected, threshold = cut_by_magnitude(values, SCALES, keep, NAMES)
        for near in (0.0, threshold, 1.001 * threshold):
            masks, found = cut_by_magnitude(
                weights, SCALES, keep, NAMES, near=near, growths=growths
            )
            # Other kernels compute the growths here, which may round in another way.
            assert found == pytest.approx(threshold, rel=1e-6)
            assert sum(int(mask.sum()) for mask in masks) == keep
            for mask, other, value, scale in zip(masks, expected, values, SCALES, strict=True):
                clear = (value.abs() * scale - threshold).abs() > 1e-6 * threshold
                assert torch.equal(mask[clear], other[clear])
                assert threshold > 0 or torch.equal(mask, other)  # ties of zeros


@pytest.mark.parametrize("size", [1e-37, 1e-13, 1e-11, 1e14])
def test_growths_whose_cubes_are_out_of_range(size):
    torch.manual_seed(0)
    start = torch.randn(30_000)
    weight = start + 0.3 * torch.randn(30_000)
    pair = torch.tensor(0.9), torch.tensor(3.0)
    usual, threshold = cut_by_magnitude(
        [weight], (1.0,), 600, ["a"], growths=[Growth(start, *pair)]
    )
    growths = [Growth(size * start, *pair)]
    masks, found = cut_by_magnitude([size * weight], (1.0,), 600, ["a"], growths=growths)
    assert found == pytest.approx(size * threshold, rel=1e-5)
    assert (masks[0] != usual[0]).sum() <= 2  # two values next to the threshold may change places


def test_nan_in_a_growth_raises():
    weight = torch.tensor([1.0, math.nan, 3.0])
    growth = Growth(torch.ones(3), torch.tensor(0.5), torch.tensor(3.0))
    with pytest.raises(NonFiniteError, match=r"\(a\) contains NaN"):
        cut_by_magnitude([weight], (1.0,), 1, ["a"], growths=[growth])


@pytest.mark.parametrize("name", ["normal", "misleading", "equal but one"])
def test_windows_and_histograms_find_the_same_value(name):
    kernels = pytest.importorskip("probmask.core.selection.magnitude_kernels")
    torch.manual_seed(0)
    weights = [LARGE[name](count) for count in (100_000, 37, 39_963)]
    pairs = zip(weights, (1.0, 2.0, 0.5), strict=True)
    cut = MagnitudeSearch(kernels, [Magnitudes(kernels, *pair) for pair in pairs])
    masks, others = ([torch.zeros(w.shape, dtype=torch.bool) for w in weights] for _ in range(2))
    arrays, other_arrays = ([mask.numpy() for mask in each] for each in (masks, others))
    for keep in (1, 3000, 60_000, 139_999):
        exact = cut._search_histograms(keep, arrays)
        found = cut._search_windows(keep, 0.0, other_arrays)
        hits = name == "normal" and 1 < keep < 139_999  # a sample cannot predict extremes
        assert found is not None or not hits
        if found is not None:
            assert found[:3] + found[4:] == exact[:3] + exact[4:]
            assert all(map(torch.equal, masks, others))
        spans = cut._mark_window(exact.cut - 100, arrays)
        above = sum(span.counts.above for span in spans)
        larger = sum(int((span.bits > exact.cut).sum()) for span in spans)
        equal = sum(int((span.bits == exact.cut).sum()) for span in spans)
        if sum(span.counts.inside - len(span.bits) for span in spans) == 0:
            assert above + larger + exact.rest == keep
            assert equal >= exact.rest


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_layouts(dtype):
    weights = [torch.randn(8, 6, 3, 3).to(dtype) for _ in range(3)]
    laid_out = [w.contiguous(memory_format=torch.channels_last) for w in weights]
    expected = select_top([w.abs() for w in weights], 100)
    for given_ in (weights, laid_out, [w.float() for w in laid_out]):
        masks, _ = cut_by_magnitude(given_, (1.0,) * 3, 100, NAMES)
        if dtype != torch.float64 or given_[0].dtype == dtype:
            assert all(torch.equal(m, e) for m, e in zip(masks, expected, strict=True))


@pytest.mark.parametrize("equal", [1, 16, 17, 5000])
@pytest.mark.parametrize("taken", [1, 15, 16, 17])
def test_a_few_equal_values_or_many(equal, taken):
    torch.manual_seed(0)
    weights = [torch.randn(100_000).abs() for _ in range(3)]
    weights[1][:equal] = -1.5
    weights[1] = weights[1][torch.randperm(100_000)]
    check(weights, (1.0,) * 3, sum(int((w.abs() > 1.5).sum()) for w in weights) + taken)


def test_masks_are_written_to_given_tensors():
    torch.manual_seed(0)
    weights = [torch.randn(8, 6, 3, 3) for _ in range(3)]
    weights[1] = weights[1].contiguous(memory_format=torch.channels_last)
    into = [torch.ones_like(weight, dtype=torch.bool) for weight in weights]
    expected, threshold = cut_by_magnitude(weights, (1.0,) * 3, 100, NAMES)
    before = [mask._version for mask in into]
    masks, same = cut_by_magnitude(weights, (1.0,) * 3, 100, NAMES, into=into)
    assert same == threshold
    assert all(map(torch.equal, masks, expected))
    if masks[0] is into[0]:  # graphs that saved the old masks become invalid
        assert all(mask._version > old for mask, old in zip(into, before, strict=True))
    else:
        assert all(bool(mask.all()) for mask in into)
    into[1] = into[1].contiguous()  # another memory order than the weight
    masks, _ = cut_by_magnitude(weights, (1.0,) * 3, 100, NAMES, into=into)
    assert all(map(torch.equal, masks, expected))
    assert masks[1] is not into[1]


@pytest.mark.parametrize("keep", [1, 50, 300, 431])
def test_ties_go_by_row_major_index_in_any_memory_order(keep):
    torch.manual_seed(0)
    weights = [torch.randint(-3, 4, (8, 6, 3, 3)).float() for _ in range(3)]
    expected = select_top([w.abs() for w in weights], keep)
    laid_out = [
        weights[0].contiguous(memory_format=torch.channels_last),
        weights[1].transpose(0, 1).contiguous().transpose(0, 1),
        weights[2].repeat(1, 1, 1, 2)[..., ::2].copy_(weights[2]),  # with gaps
    ]
    for given_ in (laid_out, laid_out[:2]):
        masks, _ = cut_by_magnitude(given_, (1.0,) * len(given_), keep, NAMES)
        right = expected if given_ is laid_out else select_top([w.abs() for w in weights[:2]], keep)
        assert all(torch.equal(m, e) for m, e in zip(masks, right, strict=True))


def test_infinity_is_the_largest_value_and_nan_raises():
    weights = [torch.tensor([1.0, -torch.inf, 0.5]), torch.ones(2), torch.zeros(1)]
    assert cut_by_magnitude(weights, (1.0,) * 3, 1, NAMES)[0][0].tolist() == [False, True, False]
    weights[1][0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"\(b\) contains NaN"):
        cut_by_magnitude(weights, (1.0,) * 3, 1, NAMES)


@pytest.mark.parametrize("keep", [0, 1, 3, 4])
def test_joined_values_with_nan_give_a_nan_threshold(keep):
    values = [torch.tensor([1.0, float("nan")]), torch.tensor([2.0, 3.0])]
    assert math.isnan(cut_joined(values, keep)[1])


def test_deterministic_algorithms_give_the_same_cut():
    torch.manual_seed(0)
    values = [torch.randn(40).mul(3).round().abs() for _ in range(3)]
    masks, threshold = cut_joined(values, 31)
    torch.use_deterministic_algorithms(True)
    try:
        again, same = cut_joined(values, 31)
    finally:
        torch.use_deterministic_algorithms(False)
    assert threshold == same
    assert all(map(torch.equal, masks, again))
