"""Multiplications per weight against counts by hand."""

import pytest
import torch
from torch import nn

import probmask
from probmask.masking.macs import CONVENTION, Macs, count_macs, macs_per_weight
from probmask.masking.sites import find_sites
from probmask.models import build_model
from reference.networks import Recurrent, Tied, Transformer, UNet, conv_net


def count(model, example, **patterns):
    sites = find_sites(model, **patterns)
    return dict(zip((s.name for s in sites), macs_per_weight(model, sites, example), strict=True))


CASES = {
    # each weight is used once per output position
    "conv1d": (nn.Conv1d(2, 4, 3), (2, 10), 8),
    "conv2d": (nn.Conv2d(3, 8, 3, padding=1), (3, 6, 5), 30),
    "strided": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (3, 8, 8), 16),
    "dilated": (nn.Conv2d(3, 8, 3, dilation=2), (3, 8, 8), 16),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2), (4, 6, 6), 16),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), (4, 6, 6), 16),
    "conv3d": (nn.Conv3d(2, 4, 2), (2, 3, 4, 5), 2 * 3 * 4),
    # in a transposed one, once per input position
    "transposed": (nn.ConvTranspose2d(4, 2, 2, stride=2), (4, 5, 6), 30),
    "grouped transposed": (nn.ConvTranspose2d(4, 4, 3, groups=2), (4, 5, 6), 30),
    "linear": (nn.Linear(7, 5), (7,), 1),
    "linear on a sequence": (nn.Linear(7, 5), (9, 7), 9),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 3])
def test_one_layer(case, batch):
    layer, shape, expected = CASES[case]
    assert count(layer, torch.randn(batch, *shape)) == {"weight": expected}


@pytest.mark.parametrize("case", ["conv1d", "conv2d", "strided", "grouped", "depthwise", "conv3d"])
def test_a_layer_against_a_naive_count(case):
    """Multiplications = weights x uses: counted as the non-zero products of an all-ones layer."""
    layer, shape, uses = CASES[case]
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.zero_()
    if any(layer.padding):
        layer = type(layer)(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            layer.stride,
            groups=layer.groups,
        )
        with torch.no_grad():
            layer.weight.fill_(1)
            layer.bias.zero_()
        uses = int(layer(torch.ones(1, *shape))[0, 0].numel())
    products = layer(torch.ones(1, *shape)).sum()
    assert count(layer, torch.ones(1, *shape))["weight"] == uses
    assert int(products) == uses * layer.weight.numel()


def test_bilinear():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.form = nn.Bilinear(3, 4, 5)

        def forward(self, x, y):
            return self.form(x, y)

    assert count(Pair(), (torch.randn(2, 3), torch.randn(2, 4))) == {"form.weight": 1}


def test_a_module_called_three_times_counts_three_times():
    assert count(Recurrent(), torch.randn(4, 6)) == {"again.weight": 3, "head.weight": 1}


def test_a_tied_weight_counts_once_per_use():
    expected = {"first.weight": 1, "left.weight": 2, "head.weight": 1}
    assert count(Tied(), torch.randn(4, 6)) == expected


def test_a_whole_unet():
    assert count(UNet(), torch.randn(2, 1, 8, 8)) == {
        "down.0.weight": 64,
        "middle.0.weight": 16,
        "up.weight": 16,
        "head.0.weight": 64,
        "head.3.weight": 64,
    }


def test_attention_counts_every_projection():
    """Five tokens: each weight of each projection, in and out, is used five times."""
    counts = count(Transformer(), torch.randint(20, (2, 5)))
    assert counts.pop("head.weight") == 1
    assert len(counts) == 8
    assert set(counts.values()) == {5}


def test_attention_over_a_memory_of_another_length():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=True)

        def forward(self, query, key, value):
            return self.attention(query=query, key=key, value=value)[0]

    example = (torch.randn(2, 3, 8), torch.randn(2, 7, 6), torch.randn(2, 7, 4))
    assert count(Cross(), example) == {
        "attention.q_proj_weight": 3,
        "attention.k_proj_weight": 7,
        "attention.v_proj_weight": 7,
        "attention.out_proj.weight": 3,
    }


def test_packed_attention_over_a_memory_of_another_length():
    """One tensor holds three projections; its total must be right: (3 + 7 + 7) E^2 products."""

    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, query, memory):
            return self.attention(query, memory, memory)[0]

    model = Cross()
    sites = find_sites(model)
    per_weight = macs_per_weight(model, sites, (torch.randn(2, 3, 8), torch.randn(2, 7, 8)))
    total = per_weight[0] * sites[0].size
    assert total == pytest.approx((3 + 7 + 7) * 64, rel=0.12)


POOLS = {
    # a global average adds every element once
    "global": (nn.AdaptiveAvgPool2d(1), (8, 7, 7), 8 * 49),
    "global by a pair": (nn.AdaptiveAvgPool2d((1, 1)), (8, 3, 5), 8 * 15),
    "adaptive, one side kept": (nn.AdaptiveAvgPool2d((None, 1)), (8, 3, 5), 8 * 15),
    "adaptive, equal windows": (nn.AdaptiveAvgPool2d(2), (3, 4, 4), 3 * 16),
    # five into two: elements 0 to 2 and 2 to 4
    "adaptive, windows that overlap": (nn.AdaptiveAvgPool2d(2), (3, 5, 4), 3 * 6 * 4),
    "adaptive in one": (nn.AdaptiveAvgPool1d(3), (2, 7), 2 * 9),
    "adaptive in three": (nn.AdaptiveAvgPool3d(1), (2, 3, 4, 5), 2 * 60),
    # any other pooling adds the elements of its windows
    "plain": (nn.AvgPool2d(2), (3, 6, 8), 3 * 6 * 8),
    "oblong": (nn.AvgPool2d((2, 3)), (3, 6, 9), 3 * 6 * 9),
    "overlapping": (nn.AvgPool2d(3, stride=1), (3, 6, 6), 3 * 16 * 9),
    "in one": (nn.AvgPool1d(2), (3, 8), 3 * 8),
    "in three": (nn.AvgPool3d(2), (3, 4, 4, 4), 3 * 64),
    "the largest is no sum": (nn.MaxPool2d(2), (3, 6, 8), 0),
}


@pytest.mark.parametrize("case", POOLS)
@pytest.mark.parametrize("batch", [1, 3])
def test_average_pooling(case, batch):
    pool, shape, expected = POOLS[case]
    counted = count_macs(pool, (), torch.randn(batch, *shape))
    assert counted == Macs(per_weight=(), sizes=(), pooling=expected)


@pytest.mark.parametrize("case", [case for case in POOLS if case != "the largest is no sum"])
def test_average_pooling_against_a_naive_count(case):
    """The number of inputs that an output depends on is the number of additions."""
    pool, shape, expected = POOLS[case]
    jacobian = torch.autograd.functional.jacobian(pool, torch.randn(1, *shape))
    assert int((jacobian != 0).sum()) == expected


class Pooled(nn.Module):
    """A pooling called twice, between a convolution and a linear layer without bias."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.pool = nn.AvgPool2d(2)
        self.head = nn.Linear(3 * 2 * 2, 5)

    def forward(self, x):
        return self.head(self.pool(self.pool(self.norm(self.conv(x)))).flatten(1))


def test_totals_with_and_without_pooling():
    model = Pooled()
    counted = count_macs(model, find_sites(model), torch.randn(4, 2, 8, 8))
    assert counted.per_weight == (64, 1)
    assert counted.sizes == (54, 60)
    assert counted.pooling == 3 * 64 + 3 * 16
    assert counted.dense == 64 * 54 + 60
    assert counted.dense_with_pooling == 64 * 54 + 60 + 240
    assert counted.sparse([54, 60]) == counted.dense
    assert counted.sparse([10, 7]) == 64 * 10 + 7
    assert counted.sparse_with_pooling([10, 7]) == 64 * 10 + 7 + 240
    assert counted.sparse([0, 0]) == 0


def test_sparse_macs_are_the_sum_of_macs_times_density():
    model = build_model("resnet14", {"width": 4})
    sites = find_sites(model)
    counted = count_macs(model, sites, torch.zeros(1, 3, 32, 32))
    kept = [site.size // (2 + index) for index, site in enumerate(sites)]
    by_layers = sum(
        uses * size * (count / size)
        for uses, size, count in zip(counted.per_weight, counted.sizes, kept, strict=True)
    )
    assert counted.sparse(kept) == round(by_layers)
    assert isinstance(counted.sparse(kept), int)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([54], "1 counts for 2 sites"),
        ([54, 60, 1], "3 counts for 2 sites"),
        ([55, 60], r"kept\[0\]=55 for a site of 54 weights"),
        ([54, -1], r"kept\[1\]=-1 for a site of 60 weights"),
    ],
)
def test_counts_that_do_not_match_the_sites_raise(kept, message):
    counted = Macs(per_weight=(64, 1), sizes=(54, 60), pooling=0)
    with pytest.raises(probmask.InputError, match=message):
        counted.sparse(kept)


def test_a_model_on_the_meta_device_costs_the_same():
    model = Pooled()
    expected = count_macs(model, find_sites(model), torch.randn(2, 2, 8, 8))
    meta = model.to("meta")
    assert count_macs(meta, find_sites(meta), torch.empty(2, 2, 8, 8, device="meta")) == expected


def test_masks_do_not_change_the_cost_of_a_weight():
    model = build_model("smallconv", {"width": 4})
    sites, example = find_sites(model), torch.zeros(1, 1, 8, 8)
    before = count_macs(model, sites, example)
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=3, seed=0)
    assert count_macs(model, sites, example) == before


def test_the_convention_names_str_and_pooling():
    assert "STR's convention" in CONVENTION
    assert "average pooling, one per input element, is listed separately" in CONVENTION


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_forms_of_an_example(form):
    x = torch.randn(2, 1, 6, 6)
    example = {"input": x} if form is dict else form([x])
    assert count(conv_net(), example) == {"0.weight": 36, "4.weight": 1}


def test_counting_does_not_change_the_model():
    model = nn.Sequential(conv_net(), nn.Dropout(0.5))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    count(model, torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training
    assert model[1].training
    assert not model[0][0]._forward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("example", ["text", torch.tensor(1.0), torch.empty(0, 3), [], {}])
def test_an_example_that_is_not_a_batch_raises(example):
    with pytest.raises(probmask.InputError, match=r"example_inputs=.*batch dimension first"):
        count(nn.Linear(3, 3), example)


def test_a_module_with_unknown_macs_raises():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return x @ self.scale

    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), Scaled())
    example = torch.tensor([[1, 2]])
    assert count(model, example) == {"1.weight": 2}
    assert count(model, example, include=["0"]) == {"0.weight": 0, "1.weight": 2}
    with pytest.raises(
        probmask.InputError, match=r"Scaled\.scale: its MACs are unknown.*exclude it or budget"
    ):
        count(model, example, include=["2.scale"])


def test_attach_raises_for_a_weight_without_multiplications():
    """A weight without cost cannot be budgeted; attach raises, not the first update."""

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(3, 3)
            self.unused = nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(probmask.InputError, match=r"unused\.weight"):
        probmask.attach(
            Idle(),
            probmask.TiedProbMask(sparsity=0.5, cost="flops"),
            total_steps=3,
            example_inputs=torch.randn(1, 3),
        )
