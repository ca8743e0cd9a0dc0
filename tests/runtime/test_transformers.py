"""Transformers run on the kernels as a whole, and agree with PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import probmask
from probmask.runtime.plan.partition import steps_of
from runtime.comparing import assert_close, assert_same
from runtime.networks import masked


def nodes_in_pytorch(engine):
    steps = steps_of(engine.network, set(engine.choices.sparse))
    return [node.label.split("(")[-1] for step in steps if not step.sparse for node in step.nodes]


class Encoder(nn.Module):
    """PyTorch's encoder layers, in which the batch is the second dimension of attention."""

    def __init__(self, **settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, **settings)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "settings", [{"activation": "gelu"}, {"norm_first": True, "bias": False}], ids=str
)
def test_an_encoder_runs_without_leaving_the_kernels(settings):
    torch.manual_seed(0)
    model = masked(Encoder(**settings), 0.6)
    others = [(torch.randn(n, 19, 24),) for n in (1, 5, 18)]
    engine = assert_same(model, torch.randn(2, 19, 24), others=others)
    assert nodes_in_pytorch(engine) == []


class Decoder(nn.Module):
    """A causal block with RMSNorm written out, grouped heads, rotation and a gated network."""

    def __init__(self, width=32, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.keys = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gated, self.down = nn.Linear(width, 96), nn.Linear(48, width)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        angles = torch.arange(17)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03]).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def norm(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat([-second, first], -1) * self.sin

    def forward(self, x):
        batch, tokens, _ = x.shape
        y = self.norm(x)
        q = self.query(y).view(batch, tokens, self.heads, self.size).transpose(1, 2)
        k, v = self.keys(y).view(batch, tokens, 2, self.groups, self.size).unbind(2)
        k = self.rotate(k.transpose(1, 2))[:, :, None]
        k = k.expand(-1, -1, self.heads // self.groups, -1, -1)
        k = k.reshape(batch, self.heads, tokens, self.size)
        v = v.transpose(1, 2).repeat_interleave(self.heads // self.groups, 1)
        z = functional.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.out(z.transpose(1, 2).reshape(batch, tokens, -1))
        up, gate = self.gated(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def test_a_decoder_block():
    torch.manual_seed(0)
    model = masked(Decoder(), 0.5)
    engine = assert_same(model, torch.randn(2, 17, 32), others=[(torch.randn(1, 17, 32),)])
    assert nodes_in_pytorch(engine) == []


class Patches(nn.Module):
    """A small ViT: patches, a class token, positions, and attention written out."""

    def __init__(self, width=24):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width))
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.head = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions
        batch, tokens, width = x.shape
        mixed = self.mix(self.norm(x)).reshape(batch, tokens, 3, 3, width // 3)
        q, k, v = mixed.permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-2, -1)) / 3).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return self.head(x[:, 0]), x.mean(1)


def test_a_vision_transformer():
    torch.manual_seed(0)
    model = masked(Patches(), 0.5)
    others = [(torch.randn(n, 3, 16, 16),) for n in (1, 3)]
    engine = assert_same(model, torch.randn(2, 3, 16, 16), others=others)
    assert nodes_in_pytorch(engine) == []


class Masked(nn.Module):
    def __init__(self, *, written_out=False):
        super().__init__()
        self.mix, self.written_out = nn.Linear(16, 48), written_out

    def forward(self, x, mask):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        mask = mask[:, None, None, :] if mask.dim() == 2 else mask[:, None]
        if self.written_out:
            return (q @ k.transpose(-1, -2) / 8**0.5 + mask).softmax(-1) @ v
        return functional.scaled_dot_product_attention(q, k, v, mask)


def masks(kind, by_query):
    """Return a mask, and one that hides all keys from some queries."""
    visible = torch.rand(3, 21, 21) < 0.6 if by_query else torch.rand(3, 21) < 0.6
    visible[..., 0] = True
    nothing = visible.clone()
    nothing[1, 7:11] = False
    if not by_query:
        nothing[1] = False
    if kind == "boolean":
        return visible, nothing
    hidden = {"infinite": -torch.inf, "lowest": torch.finfo(torch.float32).min}[kind]
    return tuple(torch.zeros(m.shape).masked_fill(~m, hidden) for m in (visible, nothing))


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize(
    ("written_out", "kind"),
    [
        (False, "boolean"),
        (False, "infinite"),
        (False, "lowest"),
        (True, "infinite"),
        (True, "lowest"),
    ],
)
def test_masks_and_queries_that_see_nothing(written_out, kind, by_query):
    """Such a query gives zeros; NaN, in PyTorch, where the softmax is written out."""
    torch.manual_seed(0)
    x = torch.randn(3, 21, 16)
    visible, nothing = masks(kind, by_query)
    model = masked(Masked(written_out=written_out), 0.3)
    engine = assert_same(model, x, visible, others=[(x, nothing)])
    assert any("matmul" in name or "attention" in name for name in engine.choices.sparse)
    with torch.no_grad():
        values = dict(zip(engine.network.inputs, (x, nothing), strict=True))
        on_kernels = engine._schedule.run(values)[1]
        assert on_kernels == bool(model(x, nothing).isfinite().all())
        assert on_kernels == (kind != "infinite" or not written_out)


@pytest.mark.parametrize("tokens", [3, 8, 9, 16, 20, 40, 61])
def test_queries_that_fill_no_vector_or_half_of_the_last_one(tokens):
    torch.manual_seed(0)
    x, visible = torch.randn(2, tokens, 16), torch.ones(2, tokens, dtype=torch.bool)
    engine = assert_same(masked(Masked(), 0.3), x, visible)
    assert any("attention" in name for name in engine.choices.sparse)


def test_numbers_that_are_not_finite_come_out_as_in_pytorch():
    torch.manual_seed(0)
    model = masked(Encoder(activation="gelu"), 0.6)
    x = torch.randn(2, 19, 24)
    huge, unknown = x.clone(), x.clone()
    huge[0, 3, 2] = 1e30
    unknown[1, 0, 0] = float("nan")
    assert_same(model, x, others=[(huge,), (unknown,)])


def test_a_bert_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    model = masked(transformers.BertModel(config, add_pooling_layer=False), 0.6)
    tokens = torch.randint(0, 50, (2, 18))
    kept = torch.ones(2, 18, dtype=torch.int64)
    kept[1, 11:] = 0
    engine = probmask.runtime.compile(model, (tokens, kept), layers="sparse")
    for n in (2, 1):
        with torch.no_grad():
            expected = model(tokens[:n], kept[:n]).last_hidden_state
        assert_close(engine(tokens[:n], kept[:n]).last_hidden_state, expected)
    in_pytorch = nodes_in_pytorch(engine)
    assert not any("linear" in label or "norm" in label for label in in_pytorch)


@pytest.mark.parametrize(
    "function",
    [
        nn.SiLU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.Hardswish(),
        nn.Tanh(),
        nn.Mish(),
        nn.ELU(),
        nn.LeakyReLU(),
    ],
    ids=str,
)
def test_activations_are_accurate(function):
    """Compare with double precision, relative to the input, from tiny to huge numbers."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([1e-30, -1e-30, 1e10, -1e10])])
    model = nn.Sequential(nn.Linear(1, 1), function)
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[0].bias.fill_(0)
        engine = probmask.runtime.compile(model, torch.zeros(len(x), 1), layers="sparse")
        expected = function(x.double())
    found = engine(x[:, None])[:, 0].double()
    assert ((found - expected).abs() <= 4e-7 * x.double().abs()).all()


def test_the_model_runs_if_nothing_is_faster():
    """A tiny dense network: the model itself is the baseline, and its speed is reached."""
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    engine = probmask.runtime.compile(model, x, threads=1)
    rows = engine.describe()
    assert all(row["pytorch_ms"] > 0 for row in rows if row["runs"] != "kernels")
    with torch.no_grad():
        assert_close(engine(x), model(x))
