"""The projection: against two references, its KKT conditions and a quadratic program."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import quadprog
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from probmask.core.projection import budget_projection, project_
from probmask.core.projection.passes import kernels_over
from probmask.core.shards import Shards
from probmask.errors import InputError, NonFiniteError
from reference.projection import project, project_huge, project_with_costs
from reference.thread_shards import on_shards

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [(7,), (3, 5), (), (4, 2, 3, 3), (0,), (1,), (2, 0, 3), (250, 270)]
FLOAT32_MAX = torch.finfo(torch.float32).max

DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "uniform": torch.rand,
    "normal": torch.randn,
    "wide": lambda shape: 100 * torch.randn(shape),
    "ones": torch.ones,
    "after Adam": lambda shape: (
        (torch.rand(shape) < 0.05) * torch.rand(shape) + 3e-3 * torch.randn(shape)
    ),
    "ties": lambda shape: torch.randint(-2, 5, shape) / 4,
    "tiny": lambda shape: 1e-20 * torch.randn(shape),
    "cubed": lambda shape: torch.randn(shape) ** 9,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small operations on several threads take a hundred times longer on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    return torch.cat([t.detach().reshape(-1).double() for t in tensors]).numpy()


def draw(name: str, seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    torch.manual_seed(seed)
    return [DISTRIBUTIONS[name](shape) for shape in shapes]


def draw_costs(probs: Sequence[Tensor]) -> list[Tensor | float]:
    """Return numbers and tensors alternately."""
    return [torch.rand_like(z) + 0.1 if i % 2 else 0.5 + i for i, z in enumerate(probs)]


def flat_costs(costs: Sequence[Tensor | float], probs: Sequence[Tensor]) -> np.ndarray:
    return flat(
        [
            torch.as_tensor(c, dtype=torch.float64).expand(z.shape)
            for c, z in zip(costs, probs, strict=True)
        ]
    )


def slack(s: np.ndarray, keep: float, c: np.ndarray | float = 1.0) -> float:
    """Return the error of an entry in (0, 1) if Σ c·s is off by 1e-6·keep."""
    slope = (c**2 * ((s > 0) & (s < 1))).sum()
    return 1e-6 * keep * float(np.max(c) / (slope or 1.0))


def off(probs: Sequence[Tensor], keep: float, c: np.ndarray | float = 1.0) -> float:
    return abs(float((c * flat(probs)).sum()) - keep) / keep


# Against the references


@pytest.mark.parametrize("fraction", [1e-5, 0.001, 0.02, 0.5, 0.99, 1.1])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_reference(name: str, fraction: float, dtype: torch.dtype) -> None:
    probs = [z.to(dtype) for z in draw(name)]
    z = flat(probs)
    keep = fraction * np.clip(z, 0, 1).sum()
    expected, v = project(z, keep)
    assert project_(probs, keep) == pytest.approx(v, rel=1e-6, abs=slack(expected, keep))
    np.testing.assert_allclose(flat(probs), expected, rtol=1e-6, atol=slack(expected, keep))
    if fraction < 1:
        assert off(probs, keep) < 1e-6


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.9, 2.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_equals_the_reference_with_costs(name: str, fraction: float) -> None:
    probs = draw(name)
    costs = draw_costs(probs)
    z, c = flat(probs), flat_costs(costs, probs)
    keep = fraction * (c * np.clip(z, 0, 1)).sum()
    expected, v = project_with_costs(z, c, keep)
    assert project_(probs, keep, costs=costs) == pytest.approx(
        v, rel=1e-6, abs=slack(expected, keep, c)
    )
    np.testing.assert_allclose(flat(probs), expected, rtol=1e-6, atol=slack(expected, keep, c))
    if fraction < 1:
        assert off(probs, keep, c) < 1e-6


@pytest.mark.parametrize("seed", range(30))
def test_equals_the_reference_at_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(0, 12, rng.integers(0, 4))) for _ in range(rng.integers(1, 9))]
    probs = draw(list(DISTRIBUTIONS)[seed % len(DISTRIBUTIONS)], seed, [*shapes, (3,)])
    z = flat(probs)
    keep = float(rng.uniform(0, 1.2)) * np.clip(z, 0, 1).sum()
    expected, _ = project(z, keep)
    project_(probs, keep)
    np.testing.assert_allclose(flat(probs), expected, rtol=1e-6, atol=slack(expected, keep))


# Against the definition


@pytest.mark.parametrize("with_costs", [False, True])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_satisfies_the_kkt_conditions(name: str, with_costs: bool) -> None:
    probs = [z.double() for z in draw(name, 1)]
    costs = draw_costs(probs) if with_costs else None
    c = flat_costs(costs or [1.0] * len(probs), probs)
    z = flat(probs)
    for fraction in (0.3, 3.0):
        keep = fraction * (c * np.clip(z, 0, 1)).sum()
        trial = [p.clone() for p in probs]
        v = project_(trial, keep, costs=costs)
        s = flat(trial)
        assert ((s >= 0) & (s <= 1)).all()
        assert (c * s).sum() <= keep * (1 + 1e-6)
        assert v >= 0
        assert v * abs((c * s).sum() - keep) <= 1e-6 * v * keep
        gradient, tiny = s - z + v * c, 1e-12 * max(1.0, abs(z).max())
        assert (abs(gradient[(s > 0) & (s < 1)]) <= tiny).all()
        assert (gradient[s == 0] >= -tiny).all()
        assert (gradient[s == 1] <= tiny).all()


@pytest.mark.parametrize("with_costs", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_equals_a_quadratic_program(seed: int, with_costs: bool) -> None:
    rng = np.random.default_rng(seed)
    n = 25
    z, keep = rng.normal(0.3, 0.6, n), float(rng.uniform(0.5, 8))
    c = rng.uniform(0.2, 3, n) if with_costs else np.ones(n)
    constraints = np.concatenate([np.eye(n), -np.eye(n), -c[None]])
    bounds = np.concatenate([np.zeros(n), -np.ones(n), [-keep]])
    expected = quadprog.solve_qp(np.eye(n), z, constraints.T, bounds)[0]
    probs = list(torch.tensor(z).split(7))
    project_(probs, keep, costs=list(torch.tensor(c).split(7)))
    np.testing.assert_allclose(flat(probs), expected, atol=3e-6)


# Odd inputs

VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 1e-45, 1e-40, 2.0**-24, 1 - 2.0**-24]),
    st.floats(-2, 2, width=32),
    st.floats(-(2.0**20), 2.0**20, width=32),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(VALUES, max_size=6), min_size=1, max_size=6), st.floats(0, 1.5))
@example([[0.0], []], 0.0)
@example([[1.0] * 5, [1.0] * 5], 1.0)
@example([[1e-45, 1e-45, 2e-45]], 0.5)
@example([[2.0**20] * 6, [2.0**20 + 1]], 0.3)
def test_odd_inputs(rows: list[list[float]], fraction: float) -> None:
    probs = [torch.tensor(row, dtype=torch.float32) for row in rows]
    z = flat(probs)
    keep = fraction * len(z)
    expected, _ = project(z, keep)
    v = project_(probs, keep)
    s = flat(probs)
    assert v >= 0
    assert ((s >= 0) & (s <= 1)).all()
    assert s.sum() <= keep * (1 + 1e-6) + 1e-44 * len(z)
    np.testing.assert_allclose(s, expected, atol=2e-6 * max(1.0, keep))


@settings(deadline=None, max_examples=100)
@given(st.floats(-FLOAT32_MAX, FLOAT32_MAX, width=32), st.integers(1, 40), st.floats(0.01, 1.0))
@example(1e30, 5000, 0.3)
@example(1e30, 5000, 1e-6)
@example(FLOAT32_MAX, 100, 0.999)
@example(2.0**22, 100_000, 1e-7)
@example(1.0, 100_000, 1e-7)
def test_all_equal_share_the_budget(value: float, n: int, fraction: float) -> None:
    probs = [torch.full((n,), value), torch.full((2, n), value)]
    keep = 3 * n * fraction
    project_(probs, keep)
    share = min(fraction, max(0.0, min(1.0, np.float32(value))))
    np.testing.assert_allclose(flat(probs), share, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_ties_share_the_rest_of_the_budget(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    levels = torch.tensor([-FLOAT32_MAX, -1e30, 0.7, 1e20, 1e30, FLOAT32_MAX], dtype=dtype)
    probs = [levels[torch.randint(0, 6, shape)] for shape in ((1000,), (30, 40), (0,))]
    z = flat(probs)
    for keep in (0.25, 100.5, 900.25, (z > 1).sum() - 3.5):
        trial = [p.clone() for p in probs]
        project_(trial, float(keep))
        np.testing.assert_allclose(flat(trial), project_huge(z, keep), rtol=1e-6)


@pytest.mark.parametrize("cost", [0.1, 3.0, torch.full((1000,), 0.1), torch.full((1000,), 7.0)])
def test_huge_ties_with_costs(cost: Tensor | float) -> None:
    probs = [torch.full((1000,), 1e30)]
    project_(probs, 10.0, costs=[cost])
    np.testing.assert_allclose(
        flat(probs), 10.0 / 1000 / float(torch.as_tensor(cost).max()), rtol=1e-6
    )


def test_costs_of_any_scale() -> None:
    probs = [torch.rand(300_000) for _ in range(3)]
    z = flat(probs)
    for scale in (1e-9, 1e9):
        costs = [scale, 2 * scale, scale * (1 + torch.rand(300_000))]
        c = flat_costs(costs, probs)
        keep = 0.02 * (c * z).sum()
        trial = [p.clone() for p in probs]
        project_(trial, keep, costs=costs)
        assert off(trial, keep, c) < 1e-6


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_budget_of_zero_keeps_nothing(name: str) -> None:
    probs = draw(name)
    v = project_(probs, 0.0)
    assert not flat(probs).any()
    assert v >= max(float(z.max()) for z in draw(name) if z.numel())


@pytest.mark.parametrize("keep", [1e9, math.inf])
def test_an_ample_budget_only_clips(keep: float) -> None:
    probs = draw("normal")
    assert project_(probs, keep) == 0.0
    for s, z in zip(probs, draw("normal"), strict=True):
        assert torch.equal(s, z.clamp(0, 1))


def test_zeros_and_empty_inputs() -> None:
    probs = [torch.zeros(4), torch.zeros(0)]
    assert project_(probs, 1.0) == 0.0
    assert not flat(probs).any()
    assert project_([], 1.0) == 0.0
    assert project_([torch.zeros(0)], 1.0) == 0.0


# Size


def network(draw_one: Callable[[int], Tensor]) -> list[Tensor]:
    """25 million entries in tensors of uneven size."""
    return [draw_one(n) for n in [2_359_296] * 9 + [1_000_003] * 3 + [262_144] * 3 + [9_408] * 5]


MILLIONS: dict[str, tuple[Callable[[int], Tensor], float]] = {
    "ones": (torch.ones, 0.02),
    "0.98": (lambda n: torch.full((n,), 0.98), 1e-3),
    "uniform": (torch.rand, 0.001),
    "after Adam": (
        lambda n: (
            torch.rand(n).sub_(0.95).clamp_(0, 0.05).mul_(20).add_(torch.randn(n), alpha=3e-3)
        ),
        0.02,
    ),
}


@pytest.mark.parametrize("name", MILLIONS)
def test_meets_the_budget_on_25_million_entries(name: str) -> None:
    torch.manual_seed(0)
    draw_one, fraction = MILLIONS[name]
    probs = network(draw_one)
    keep = fraction * sum(len(z) for z in probs)
    first = probs[0][:1000].clone().double()
    v = project_(probs, keep)
    kept = sum(float(s.sum(dtype=torch.float64)) for s in probs)
    assert abs(kept - keep) < 1e-6 * keep
    torch.testing.assert_close(probs[0][:1000].double(), (first - v).clamp(0, 1), rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_projecting_twice_changes_nothing(name: str) -> None:
    probs = draw(name)
    project_(probs, 0.1 * np.clip(flat(probs), 0, 1).sum())
    once = flat(probs)
    project_(probs, 0.1 * np.clip(flat(draw(name)), 0, 1).sum())
    np.testing.assert_allclose(flat(probs), once, rtol=1e-6, atol=1e-6 * once.max())


def test_same_input_same_bits() -> None:
    results = []
    for _ in range(3):
        probs = draw("after Adam", shapes=[(900, 900), (33,)])
        results.append((project_(probs, 5000.0), flat(probs).tobytes()))
    assert len(set(results)) == 1


def test_the_number_of_threads_changes_no_bit(backend: str) -> None:
    if backend == "plain":
        pytest.skip("PyTorch's sums depend on the number of threads")
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        probs = draw("after Adam", shapes=[(900, 900), (70_001,), (33,)])
        results.append((project_(probs, 5000.0), flat(probs).tobytes()))
    assert len(set(results)) == 1


def test_compiled_and_plain_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for costs in (None, [1.0, 0.3, 7.0]):
        results = []
        for kernels in (kernels_over, lambda sites: None):
            monkeypatch.setattr(budget_projection, "kernels_over", kernels)
            probs = draw("after Adam", shapes=[(900, 900), (70_001,), (33,)])
            v = project_(probs, 5000.0, costs=costs)
            results.append((v, flat(probs)))
        (v, s), (w, t) = results
        assert v == pytest.approx(w, rel=1e-6)
        np.testing.assert_allclose(s, t, atol=4e-7 * v, rtol=1e-6)


def test_writing_increments_the_version_of_a_tensor() -> None:
    probs = [torch.rand(40), torch.nn.Parameter(torch.rand(6, 5)), torch.rand(4, 6).t()]
    versions = [z._version for z in probs]
    project_(probs, 3.0)
    assert all(z._version > old for z, old in zip(probs, versions, strict=True))
    with torch.inference_mode():
        project_([torch.rand(40)], 3.0)


# Layout


def views(z: Tensor) -> list[Tensor]:
    """Return the same (8, 6, 3, 3) entries: channels last, transposed, strided and sliced."""
    every_other = torch.full((8, 12, 3, 3), 9.0)[:, ::2]
    sliced = torch.full((10, 6, 5, 3), 9.0)[1:9, :, 1:4]
    return [
        z.clone(memory_format=torch.channels_last),
        z.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        every_other.copy_(z),
        sliced.copy_(z),
    ]


def test_the_memory_order_does_not_matter() -> None:
    torch.manual_seed(0)
    z, c = torch.rand(8, 6, 3, 3), 0.5 + torch.rand(8, 6, 3, 3)
    expected = z.clone()
    project_([expected], 20.0, costs=[c])
    for view in views(z):
        for cost in (c, c.contiguous(memory_format=torch.channels_last)):
            trial = view.clone() if view.is_contiguous() else view
            trial.copy_(z)
            pointer, stride = trial.data_ptr(), trial.stride()
            project_([trial], 20.0, costs=[cost])
            assert (trial.data_ptr(), trial.stride()) == (pointer, stride)
            torch.testing.assert_close(trial, expected, rtol=1e-6, atol=1e-7)


def test_entries_outside_a_slice_do_not_change() -> None:
    whole = torch.full((10, 10), 0.9)
    project_([whole[2:5, ::3]], 3.0)
    assert int((whole == 0.9).sum()) == 100 - 12
    assert float(whole[2:5, ::3].sum()) == pytest.approx(3.0, rel=1e-6)


def test_a_parameter_is_projected_in_place() -> None:
    s = torch.nn.Parameter(torch.ones(10, 10))
    project_([s], 20.0, costs=[torch.ones(10, 10, requires_grad=True)])
    assert s.requires_grad
    assert s.is_leaf
    assert s.grad_fn is None
    torch.testing.assert_close(s.detach(), torch.full((10, 10), 0.2))


def test_dtypes_may_be_mixed() -> None:
    probs = [torch.rand(100), torch.rand(100, dtype=torch.float64), torch.rand(70_000)]
    project_(probs, 12.0)
    assert off(probs, 12.0) < 1e-6
    assert [z.dtype for z in probs] == [torch.float32, torch.float64, torch.float32]


# Errors


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 4, 5000, 69_999])
def test_non_finite_input_names_the_site_and_changes_nothing(bad: float, position: int) -> None:
    probs = [torch.rand(3, 3), torch.rand(70_000), torch.rand(2)]
    probs[1][position] = bad
    before = [z.clone() for z in probs]
    rule = "NaN and infinity have no projection. No tensor was changed"
    with pytest.raises(NonFiniteError, match=re.escape(f"project_(tensor 1): {rule}")):
        project_(probs, 1.0)
    with pytest.raises(NonFiniteError, match=re.escape(f"project_(conv2): {rule}")):
        project_(probs, 0.0, names=["conv1", "conv2", "fc"])
    for z, old in zip(probs, before, strict=True):
        torch.testing.assert_close(z, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("keep", "options", "message"),
    [
        (
            -1,
            {},
            "project_(keep=-1): keep is the budget for Σ c·s and must be ≥ 0; to keep 2 % of n",
        ),
        (math.nan, {}, "project_(keep=nan): keep is the budget for Σ c·s and must be ≥ 0;"),
        (
            1,
            {"names": ["a"]},
            "project_(1 names for 2 tensors): pass one for each tensor",
        ),
        (
            1,
            {"costs": [1.0] * 3},
            "project_(3 costs for 2 tensors): pass one for each tensor",
        ),
        (1, {"costs": [1.0, 0.0]}, "project_(cost 0.0 for tensor 1): costs must be positive and"),
        (1, {"costs": [-2.0, 1.0]}, "project_(cost -2.0 for tensor 0): costs must be positive and"),
        (1, {"costs": [math.inf, 1.0]}, "project_(cost inf for tensor 0): costs must be positive"),
        (1, {"costs": [math.nan, 1.0]}, "project_(cost nan for tensor 0): costs must be positive"),
        (
            1,
            {"costs": [torch.tensor([1.0, 2.0, -0.5, 1.0]), 1.0], "names": ["fc", "conv"]},
            "project_(cost -0.5 for fc): costs must be positive and finite; do not pass tensors",
        ),
        (
            1,
            {"costs": [torch.tensor([1.0, math.nan, 1.0, 1.0]), 1.0]},
            "project_(cost nan for tensor 0): costs must be positive and finite;",
        ),
        (
            1,
            {"costs": [torch.ones(5), 1.0]},
            "project_(costs of shape (5,) for tensor 0): the tensor has shape (4,); pass a number",
        ),
    ],
)
def test_wrong_input_raises(keep: float, options: dict[str, object], message: str) -> None:
    probs = [torch.full((4,), 0.9), torch.full((2, 3), 0.9)]
    with pytest.raises(InputError, match=re.escape(message)):
        project_(probs, keep, **options)
    assert all(bool((z == 0.9).all()) for z in probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_other_dtypes_raise(dtype: torch.dtype) -> None:
    probs = [torch.ones(4), torch.ones(4, dtype=dtype)]
    message = (
        f"project_(tensor 1 of dtype {dtype}): the budget can only be met in float32 or float64;"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        project_(probs, 1.0)
    assert bool((probs[0] == 1).all())


# Shards


def project_shards(shards: list[list[Tensor]], keep: float) -> list[float | Exception]:
    def project(rank: Shards) -> float:
        return project_(shards[rank.index], keep, shards=rank)

    return on_shards(len(shards), project)


@pytest.mark.parametrize("keep", [0.0, 100.5, 3000.0, 1e9])
@pytest.mark.parametrize("name", ["after Adam", "ones", "wide"])
def test_shards_agree_with_the_whole(name: str, keep: float) -> None:
    probs = draw(name, shapes=[(300_000,), (64, 10), (5,)])
    shards = [[probs[0][:1000], probs[1]], [probs[0][1000:], probs[2], torch.zeros(0)], []]
    shards = [[z.clone() for z in shard] for shard in shards]
    v = project_(probs, keep)
    results = project_shards(shards, keep)
    assert len(set(results)) == 1
    if keep > 0:
        assert results[0] == pytest.approx(v, rel=1e-6, abs=slack(flat(probs), keep))
    whole = np.concatenate([flat(shards[0][:1]), flat(shards[1][:1])])
    expected = flat(probs[:1])
    np.testing.assert_allclose(whole, expected, rtol=1e-6, atol=slack(expected, keep))
    if 0 < keep < 1e9:
        assert abs(sum(flat(shard).sum() for shard in shards[:2]) - keep) < 1e-6 * keep


def test_ranks_with_and_without_kernels_agree() -> None:
    """One rank has fp64 tensors and no kernels; all ranks evaluate the same values of v."""
    probs = draw("after Adam", shapes=[(300_000,), (64, 10)])
    shards = [[probs[0][:1000].clone()], [probs[0][1000:].double(), probs[1].clone()]]
    v = project_(probs, 3000.0)
    first, second = project_shards(shards, 3000.0)
    assert first == second
    assert first == pytest.approx(v, rel=1e-6)
    assert abs(sum(flat(shard).sum() for shard in shards) - 3000.0) < 3e-3


def test_every_rank_raises_for_nan() -> None:
    first, second = project_shards([[torch.ones(3)], [torch.tensor([1.0, math.nan])]], 1.0)
    assert "project_(a tensor of another rank): NaN" in str(first)
    assert "project_(tensor 0): NaN" in str(second)
