"""`explain` shows that whole networks run on the kernels, and its rows add up to the call."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from probmask.models import MODELS
from probmask.runtime.plan.partition import Choices
from reference.published_resnets import Published20, Published50
from runtime.networks import masked
from runtime.rearranging import REARRANGING
from runtime.test_images import Block, LayerNorm2d, Squeeze, UNet, conv, enlarge
from runtime.test_recurrent import pruned
from runtime.test_transformers import Decoder, Encoder, Patches
from runtime.test_volumes import Volumes


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def explained(engine, capsys):
    """Return the printed rows as (operation, place, time), and the printed time of a call."""
    capsys.readouterr()
    engine.explain()
    header, *lines = capsys.readouterr().out.splitlines()
    rows = []
    for line in lines[: lines.index("")]:
        place = cell(header, line, "runs in")
        headings = [h for h in ("kernels ", "PyTorch ") if cell(header, line, h, right=True)]
        wanted = "kernels " if place == "kernels" else "PyTorch "
        taken = cell(header, line, wanted if place else headings[0], right=True)
        rows.append((line[: header.index("output")].strip(), place, float(taken)))
    return rows, float(lines[-1].split()[0])


def cell(header, line, heading, *, right=False):
    """Return a cell of a line; headings of numbers have a unit, and end where the numbers do."""
    begin = header.index(heading)
    if right:
        end = begin + len(heading) + 2
        return line[:end].split("  ")[-1].strip() if line[end - 1 : end].strip() else ""
    return line[begin : begin + len(heading)].strip()


def convnext():
    stem = [conv(3, 6, 4, stride=4, padding=0), LayerNorm2d(6), Block(6)]
    stage = [LayerNorm2d(6), conv(6, 8, 2, stride=2, padding=0), Block(8)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)]
    return nn.Sequential(*stem, *stage, *head)


def transposed():
    up = nn.ConvTranspose2d(4, 8, 3, 2, 1, 1)
    return nn.Sequential(conv(), up, nn.GroupNorm(2, 8), nn.ReLU(), nn.InstanceNorm2d(8), conv(8))


NETWORKS = {
    "encoder": (lambda: Encoder(activation="gelu"), (19, 24)),
    "decoder": (Decoder, (17, 32)),
    "vit": (Patches, (3, 16, 16)),
    "unet": (lambda: UNet(lambda a, b: nn.ConvTranspose2d(a, b, 2, 2)), (3, 12, 16)),
    "unet, upsampling": (lambda: UNet(enlarge(mode="bilinear")), (3, 12, 16)),
    "convnext": (convnext, (3, 24, 32)),
    "squeeze and excitation": (lambda: Squeeze("view"), (3, 6, 8)),
    "resnet20, option A": (lambda: MODELS["resnet20"].build(shortcut="pad", width=4), (3, 16, 16)),
    "resnet20, published": (Published20, (3, 32, 32)),
    "resnet50, published": (Published50, (3, 64, 64)),
    "mobilenetv1": (lambda: MODELS["mobilenetv1"].build(width=4), (3, 32, 32)),
    "volumes": (Volumes, (2, 6, 9, 8)),
    "transposed and normalized": (transposed, (4, 5, 7)),
    **REARRANGING,
}


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks_run_on_the_kernels(name, capsys):
    build, shape = NETWORKS[name]
    engine = probmask.runtime.compile(
        masked(build(), 0.7), torch.randn(1, *shape), layers="sparse", threads=1
    )
    rows, call = explained(engine, capsys)
    assert {place for _, place, _ in rows[:-1]} == {"kernels"}
    assert len(rows) == len(engine.network.nodes) + 1
    assert sum(taken for _, _, taken in rows) == pytest.approx(call, abs=0.01 * len(rows))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers_are_one_row_on_the_kernels(kind, bidirectional, capsys):
    """Initial states of zeros, as they are often written, are no operation."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(6, 16, 2, batch_first=True, bidirectional=bidirectional)
            self.head = nn.Linear(16 * (1 + bidirectional), 3)

        def forward(self, x):
            state = torch.zeros(2 * (1 + bidirectional), len(x), 16)
            both = (state, state) if kind is nn.LSTM else state
            return self.head(self.layer(x, both)[0])

    model, x = pruned(Tagger()), torch.randn(1, 9, 6)
    engine = probmask.runtime.compile(model, x, layers="sparse", threads=1)
    rows, call = explained(engine, capsys)
    assert [place for _, place, _ in rows[:-1]] == ["kernels"] * 2
    assert sum(taken for _, _, taken in rows) == pytest.approx(call, abs=0.01 * len(rows))
    assert engine.network.batch_fixed_by == ""


@pytest.mark.parametrize("layers", ["sparse", "dense"])
def test_operations_without_a_kernel_count_too(layers, capsys):
    class Ranking(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

        def forward(self, x):
            return self.second(functional.relu(self.first(x)).sort(-1).values)

    engine = probmask.runtime.compile(Ranking(), torch.randn(4, 64), layers=layers, threads=1)
    rows, call = explained(engine, capsys)
    (slow,) = [taken for name, place, taken in rows if "sort" in name and place == "PyTorch"]
    assert slow > 0
    assert sum(taken for _, _, taken in rows) == pytest.approx(call, abs=0.01 * len(rows))


def test_the_rows_add_up_if_the_model_itself_runs(capsys):
    engine = probmask.runtime.compile(nn.Linear(8, 8), torch.randn(2, 8), threads=1)
    engine.use(Choices(frozenset(), {}, model=True))
    rows, call = explained(engine, capsys)
    assert [place for _, place, _ in rows] == ["model", ""]
    assert sum(taken for _, _, taken in rows) == pytest.approx(call, abs=0.01 * len(rows))


REASONS = {
    "sorted": (
        lambda x: x.sort(1).values.relu().flatten(0, 1) * x.shape[0],
        {
            "sort": "no kernel",
            "getitem": "a part of what PyTorch computes",
            "relu.default": "its input does not come from a kernel",
            "sym_size.int": "a size",
        },
    ),
    "product": (
        lambda x: x @ x.transpose(2, 3),
        {"matmul.default": "no kernel for this form", "transpose.int": "a view"},
    ),
    "integers": (
        lambda x: x.argmax(-1) + 1,
        {"add.Tensor": "kernels compute in float32, not in int64"},
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_table_says_why_pytorch_runs_an_operation(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return function(self.linear(x))

    function, reasons = REASONS[name]
    x = torch.randn(2, 4, 9, 8)
    engine = probmask.runtime.compile(Model().eval(), x, threads=1, layers="sparse")
    rows = engine.describe()
    assert not any("_empty_nn_module" in row["layer"] for row in rows)
    for operation, reason in reasons.items():
        found = {row["why"] for row in rows if f"({operation}" in row["layer"]}
        assert found == {reason}, rows
