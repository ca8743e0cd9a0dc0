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


class Padded(nn.Module):
    """Sentences of which some tokens are padding, optionally causal, in an encoder."""

    def __init__(self, **settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True)
        self.words, self.settings = nn.Embedding(30, 24), settings
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.layers(self.words(tokens), src_key_padding_mask=tokens == 7, **self.settings)


class Cross(nn.Module):
    """A decoder over another sequence, in either order of the dimensions."""

    def __init__(self, *, batch_first):
        super().__init__()
        layer = nn.TransformerDecoderLayer(24, 3, 40, batch_first=batch_first)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(11)
        return self.layers(x, memory, tgt_mask=mask, tgt_is_causal=True)


class WithStates(nn.Module):
    """Attention over states of another width, then a layer."""

    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, kdim=10, vdim=14, batch_first=True)
        self.last, self.settings = nn.Linear(24, 6), settings

    def forward(self, x, keys, values):
        return self.last(x + self.attention(x, keys, values, **self.settings)[0])


class SequenceFirst(nn.Module):
    """An encoder whose batch is the second dimension, and the first of its mask."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, padding):
        return self.layers(x, src_key_padding_mask=padding)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.Linear(24, 72), nn.Linear(24, 6)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 3, 8)).unbind(2)
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5).softmax(-1)
        return self.last(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class Positions(nn.Module):
    """Values that depend on the place in the batch, or on several inputs, are not constants."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, x, first, second):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.mix(x).chunk(3, -1))
        number = torch.arange(len(x))[:, None]
        visible = (first != 3) | (number < 3)
        visible = visible & (second != 2) | (torch.ones_like(first).cumsum(0) > 4)
        visible = visible | (torch.arange(9) == 0)
        return functional.scaled_dot_product_attention(q, k, v, visible[:, None, None, :])


def words(*shape):
    """Return tokens, the last of which are padding in some sentences."""
    tokens = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(len(shape)))
    tokens[::2, shape[1] // 2 :] = 7
    return tokens


def hidden(*shape):
    return words(*shape) == 7


def causal(size):
    return torch.ones(size, size, dtype=torch.bool).triu(1)


# A network, its inputs for a number of sentences, and the operations in PyTorch.
NETWORKS = {
    "decoder": (lambda: Cross(batch_first=True), lambda n: (rand(n, 11, 24), rand(n, 5, 24)), 0),
    "decoder, batch second": (
        lambda: Cross(batch_first=False),
        lambda n: (rand(11, n, 24), rand(5, n, 24)),
        3,  # the order of the inputs and of the output
    ),
    "cross attention": (
        lambda: WithStates(need_weights=False),
        lambda n: (rand(n, 11, 24), rand(n, 5, 10), rand(n, 5, 14)),
        0,
    ),
    "cross attention with weights": (
        WithStates,
        lambda n: (rand(n, 11, 24), rand(n, 5, 10), rand(n, 5, 14)),
        0,
    ),
    "padding": (Padded, lambda n: (words(n, 11),), 2),  # the embedding and one mask
    "causal padding": (
        lambda: Padded(mask=causal(11), is_causal=True),
        lambda n: (words(n, 11),),
        2,
    ),
    "batch second": (SequenceFirst, lambda n: (rand(11, n, 24), hidden(n, 11)), 3),
    "einsum": (Einsum, lambda n: (rand(n, 11, 24),), 0),
    "mask of floats": (Masked, lambda n: (rand(n, 9, 16), rand(n, 9)), 0),
    "other values": (Positions, lambda n: (rand(n, 9, 16), words(n, 9), words(n, 9) - 4), None),
}


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("name", NETWORKS)
def test_common_transformers_run_on_the_kernels_for_any_batch_size(name):
    torch.manual_seed(0)
    build, inputs_of, in_pytorch = NETWORKS[name]
    others = [inputs_of(n) for n in (1, 3, 18)]
    engine = assert_same(masked(build(), 0.5), *inputs_of(2), others=others)
    if in_pytorch is not None:
        assert len(nodes_in_pytorch(engine)) == in_pytorch, nodes_in_pytorch(engine)
    kinds = ("attention", "matmul", "bmm")
    assert any(kind in node for node in engine.choices.sparse for kind in kinds)


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


# Settings of small networks of the package transformers, and their operations in PyTorch: the
# embedding of words, and the mask if the attended tokens are an input.
HUGGING_FACE = {
    "Bert": (
        "BertModel",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 40, "max_position_embeddings": 32},
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "use_cache": False},
    ),
    "Llama": (
        "LlamaForCausalLM",
        {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "num_key_value_heads": 1, "intermediate_size": 40, "max_position_embeddings": 32,
         "use_cache": False},
    ),
}  # fmt: skip


class FirstOutput(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, attended=None):
        return self.model(tokens, attention_mask=attended)[0]


@pytest.mark.parametrize(
    ("family", "with_mask"),
    [("Bert", True), ("Bert", False), ("GPT2", False), ("Llama", True), ("Llama", False)],
)
def test_transformers_of_hugging_face(family, with_mask, tmp_path):
    """Masks that depend on no input are constants; others are one node, also without PyTorch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    name, settings = HUGGING_FACE[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=50, **settings)
    model = masked(FirstOutput(getattr(transformers, name)(config)), 0.6)

    def inputs_of(n):
        tokens, attended = torch.randint(0, 50, (n, 18)), torch.ones(n, 18, dtype=torch.int64)
        attended[1::2, 11:] = 0
        return (tokens, attended) if with_mask else (tokens,)

    others = [inputs_of(n) for n in (1, 5)]
    engine = assert_same(model, *inputs_of(2), others=others)
    assert len(nodes_in_pytorch(engine)) == 1 + with_mask, nodes_in_pytorch(engine)
    path = tmp_path / "model.safetensors"
    probmask.save(model, path, graph=True, example=inputs_of(2))
    loaded = probmask.runtime.load(path)
    for given in others:
        with torch.no_grad():
            expected = model(*given)
        assert_close(torch.from_numpy(loaded(*(x.numpy() for x in given))), expected)


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
