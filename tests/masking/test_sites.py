"""The tensors that are masked: defaults, include, exclude, and errors."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import probmask
from probmask.masking.sites import find_sites
from reference.networks import Transformer, UNet, build, make_batches, mlp, sgd, train


def names(model, **patterns):
    return [site.name for site in find_sites(model, **patterns)]


def test_all_convolutions_linear_layers_and_attention_in_the_order_of_the_model():
    assert names(UNet()) == [
        "down.0.weight",
        "middle.0.weight",
        "up.weight",
        "head.0.weight",
        "head.3.weight",
    ]
    first = [name for name in names(Transformer()) if "layers.0" in name]
    assert first == [
        "encoder.layers.0.self_attn.in_proj_weight",
        "encoder.layers.0.self_attn.out_proj.weight",
        "encoder.layers.0.linear1.weight",
        "encoder.layers.0.linear2.weight",
    ]


def test_attention_with_other_sizes_has_three_projections():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    assert names(attention) == [
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "out_proj.weight",
    ]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(2, 4, 3),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv3d(2, 4, 3),
        nn.ConvTranspose1d(2, 4, 3),
        nn.ConvTranspose2d(2, 4, 3, groups=2),
        nn.ConvTranspose3d(2, 4, 3),
        nn.Linear(2, 4),
        nn.Bilinear(2, 3, 4),
    ],
)
def test_kinds_that_are_masked_by_default(layer):
    (site,) = find_sites(layer)
    assert site.name == "weight"
    assert site.weight is layer.weight
    assert site.shape == tuple(layer.weight.shape)
    assert site.size == layer.weight.numel()


def test_exclude():
    assert names(UNet(), exclude=["head.*"]) == ["down.0.weight", "middle.0.weight", "up.weight"]
    assert names(UNet(), exclude=["up", "*.0"]) == ["head.3.weight"]
    assert names(mlp(), exclude="0.weight") == ["2.weight", "4.weight"]  # a single pattern


def test_exclude_takes_precedence_over_include():
    assert "embed.weight" in names(Transformer(), include="embed")
    assert "embed.weight" not in names(Transformer(), include="embed", exclude="emb*")
    assert names(mlp(), include=["0.bias"])[:2] == ["0.weight", "0.bias"]


def test_an_excluded_layer_stays_dense():
    model = build("mlp")
    optimizer = sgd(model)
    sparsifier = probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.9),
        optimizer=optimizer,
        total_steps=5,
        exclude=["4"],
    )
    train(model, optimizer, make_batches("mlp", 5))
    assert sparsifier.finalize().size == 96 + 256
    assert model[4].weight.count_nonzero() == 48


@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest(argument):
    with pytest.raises(probmask.InputError) as caught:
        names(UNet(), **{argument: ["midle.0.weight"]})
    assert str(caught.value) == (
        f"{argument}='midle.0.weight': it matches no parameter of the model; "
        "did you mean 'middle.0.weight'?"
    )


class Mixture(nn.Module):
    """Two parameters used by einsum and @, a bilinear layer and a linear one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 6, 4))
        self.matrix = nn.Parameter(torch.randn(4, 4))
        self.pair = nn.Bilinear(4, 4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(torch.einsum("ni,eio->no", x, self.experts))
        return self.head(self.pair(x, x @ self.matrix))


def test_parameters_of_the_users_own_modules_train_finalize_and_save(tmp_path):
    torch.manual_seed(0)
    model = Mixture()
    assert names(model) == ["pair.weight", "head.weight"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier = probmask.attach(
        model,
        probmask.TiedProbMask(sparsity=0.75, min_keep_per_layer=1),
        optimizer=optimizer,
        total_steps=12,
        include=["experts", "matrix"],
    )
    before = model.state_dict()["experts"].clone()
    batches = make_batches("mlp", 12)
    train(model, optimizer, batches)
    evaluated = model.eval()(batches[0][0])
    summary = sparsifier.finalize()
    assert [layer.name for layer in summary.layers] == [
        "experts",
        "matrix",
        "pair.weight",
        "head.weight",
    ]
    assert (summary.kept, summary.size) == (35, 140)
    for layer in summary.layers:
        assert model.get_parameter(layer.name).count_nonzero() == layer.kept > 0
    kept = model.experts != 0
    assert not torch.equal(model.experts[kept], before[kept])
    probmask.save(model, tmp_path / "model.safetensors")
    loaded = probmask.load_into(Mixture(), tmp_path / "model.safetensors").eval()
    assert torch.equal(loaded(batches[0][0]), evaluated)


def with_embeddings():
    return nn.ModuleDict({"embed": nn.Embedding(384, 64), "head": nn.Linear(64, 10)})


def test_attach_names_the_matrices_that_it_does_not_mask():
    model = with_embeddings()
    with pytest.warns(probmask.UnmaskedWeightsWarning) as caught:
        sparsifier = probmask.attach(model, probmask.TiedProbMask(sparsity=0.9), total_steps=1)
    (warning,) = caught
    assert str(warning.message) == (
        "attach(model): 24,576 weights will not be masked: embed.weight (24,576). The sparsity is "
        "that of the other 640 weights. Pass include= to mask them too, or exclude= to omit this "
        "warning (command line: --set exclude=…)."
    )
    assert warning.filename == __file__
    summary = sparsifier.finalize()
    assert (summary.kept, summary.size, summary.sparsity) == (64, 640, 0.9)
    assert (summary.network.kept, summary.network.size) == (64 + 24_576, 640 + 24_576)
    assert str(summary).splitlines()[-2:] == [
        "all: 64 of 640 kept, 90.00 % sparse",
        "with embed.weight, not masked: 24,640 of 25,216 kept, 2.28 % sparse",
    ]


@pytest.mark.parametrize("kind", [list, iter, "".join])
def test_excluded_matrices_are_counted_without_a_warning(kind):
    model = with_embeddings()
    model["tied"] = nn.Linear(64, 384, bias=False)
    model["tied"].weight = model["embed"].weight  # excluded by either of its names
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier = probmask.attach(
            model, probmask.TiedProbMask(sparsity=0.9), total_steps=1, exclude=kind(["embed"])
        )
    assert sparsifier.summary().network.size == 25_216


def test_frozen_weights_can_be_skipped():
    """They are not sites, and not named in a warning, but are part of the whole network."""
    model = build("mlp")
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    assert names(model) == ["0.weight", "2.weight", "4.weight"]
    assert names(model, frozen="skip") == ["2.weight", "4.weight"]
    assert names(model, frozen="skip", include=["0.weight"]) == ["2.weight", "4.weight"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = probmask.TiedProbMask(sparsity=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", probmask.UnmaskedWeightsWarning)
        sparsifier = probmask.attach(
            model, method, optimizer=optimizer, total_steps=8, frozen="skip"
        )
    train(model, optimizer, make_batches("mlp", 8))
    summary = sparsifier.finalize()
    assert torch.equal(model[0].weight, before)
    assert summary.size == 16 * 16 + 16 * 3
    assert [layer.name for layer in summary.unmasked] == ["0.weight"]


@pytest.mark.filterwarnings("always:.*will not be masked")
def test_an_embedding_is_named_unless_it_is_frozen_and_skipped():
    model = with_embeddings()
    model["embed"].requires_grad_(False)
    method = probmask.TiedProbMask(sparsity=0.5)
    with pytest.warns(probmask.UnmaskedWeightsWarning, match="embed"):
        probmask.attach(model, method, total_steps=1).finalize()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        probmask.attach(model, method, total_steps=1, frozen="skip")


def test_nothing_is_left_if_all_weights_are_frozen_and_skipped():
    model = mlp().requires_grad_(False)
    with pytest.raises(probmask.InputError, match=r"nothing to mask.*skipped by frozen='skip'"):
        names(model, frozen="skip")


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_raise(kind):
    model = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 2))
    assert names(model) == ["1.weight"]
    with pytest.raises(
        probmask.InputError, match=r"include='0\.weight'.*build it with sparse=False"
    ):
        names(model, include=["0"])


def test_attaching_twice_raises():
    model = mlp()
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=5)
    with pytest.raises(probmask.InputError, match=r"already masked; finalize the earlier"):
        probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=5)


# What computes a weight from other parameters, and the way out that the error names.
COMPUTED = {
    "weight_norm": (
        nn.utils.weight_norm,
        "a hook computes 2.weight from weight_g and weight_v",
        "torch.nn.utils.remove_weight_norm(module, 'weight')",
        "exclude='2'",
    ),
    "spectral_norm": (
        nn.utils.spectral_norm,
        "a hook computes 2.weight from weight_orig",
        "torch.nn.utils.remove_spectral_norm(module, 'weight')",
        "exclude='2'",
    ),
    "parametrizations.weight_norm": (
        parametrizations.weight_norm,
        "2.weight is computed by a parametrization",
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
        "exclude='2.weight'",
    ),
    "parametrizations.spectral_norm": (
        parametrizations.spectral_norm,
        "2.weight is computed by a parametrization",
        "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')",
        "exclude='2.weight'",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the hooks are deprecated
@pytest.mark.parametrize(("apply", "cause", "way_out", "exclude"), COMPUTED.values(), ids=COMPUTED)
def test_a_computed_weight_raises_and_the_error_names_the_way_out(apply, cause, way_out, exclude):
    """A mask on its sources would not be the mask of the weight."""
    model = mlp()
    apply(model[2])
    inputs = torch.randn(2, 6)
    with pytest.raises(probmask.InputError) as raised:
        probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1)
    assert cause in str(raised.value)
    assert str(raised.value).endswith(f"remove it first, {way_out}, or pass {exclude}.")
    assert names(model, exclude=[exclude.split("'")[1]]) == ["0.weight", "4.weight"]
    before = model.eval()(inputs)
    eval(way_out, {"torch": torch, "module": model[2]})
    torch.testing.assert_close(model(inputs), before)
    sparsifier = probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1)
    assert sparsifier.finalize().kept == 200


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_computed_weight_of_a_recurrent_layer_raises():
    model = nn.LSTM(3, 4)
    nn.utils.weight_norm(model, "weight_hh_l0")
    with pytest.raises(probmask.InputError, match=r"remove_weight_norm\(module, 'weight_hh_l0'\)"):
        names(model)
    assert names(model, exclude=["weight_hh_l0_?"]) == ["weight_ih_l0"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("apply", [nn.utils.weight_norm, parametrizations.weight_norm])
def test_a_computed_weight_that_is_not_trained_is_skipped(apply):
    model = mlp()
    apply(model[2])
    model[2].requires_grad_(False)
    assert names(model, frozen="skip") == ["0.weight", "4.weight"]


def test_a_parametrized_layer_can_be_excluded():
    model = mlp()
    parametrizations.orthogonal(model[2])
    assert names(model, exclude=["2.*"]) == ["0.weight", "4.weight"]


def test_attaching_again_after_finalize():
    model = mlp()
    for sparsity, kept in ((0.5, 200), (0.8, 80)):
        sparsifier = probmask.attach(model, probmask.TiedProbMask(sparsity=sparsity), total_steps=5)
        assert sparsifier.finalize().kept == kept


def test_nothing_to_mask_raises():
    with pytest.raises(probmask.InputError, match=r"nothing to mask.*include="):
        names(nn.Sequential(nn.BatchNorm1d(4), nn.ReLU()))
    with pytest.raises(probmask.InputError, match="nothing to mask"):
        names(mlp(), exclude=["*"])


def test_an_uninitialized_lazy_layer_raises():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(
        probmask.InputError,
        match=r"0\.weight is not initialized yet; pass one batch through model\.eval\(\)",
    ):
        probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1)
    model(torch.randn(2, 3))
    assert names(model) == ["0.weight", "1.weight"]


def test_integer_and_complex_weights_raise():
    with pytest.raises(probmask.InputError, match=r"complex64; only floating-point"):
        names(nn.Linear(3, 3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"min_keep_per_layer": 1000}, {}),
        ({"cost": "flops"}, {}),
        ({"cost": "flops", "scope": "layer"}, {}),
        ({}, {"exclude": ["nowhere"]}),
    ],
)
def test_a_failed_attach_does_not_change_the_model(settings, arguments):
    model = build("mlp")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(probmask.InputError):
        probmask.attach(
            model, probmask.TiedProbMask(sparsity=0.5, **settings), total_steps=5, **arguments
        )
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.requires_grad for p in model.parameters())


def pruned_by_torch():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prune.l1_unstructured(model[1], "weight", 0.5)
    return model


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (pruned_by_torch(), {}, r"attach\(model\): torch\.nn\.utils\.prune still masks 1\.weight"),
        (nn.Linear, {}, r"attach\(model\): expected an nn\.Module, not the class Linear"),
        ({"weight": 1}, {}, r"attach\(model\): expected an nn\.Module, not dict"),
        (nn.Linear(3, 3), {"phases": [3]}, r"attach\(phases=\[3\]\): expected a list of"),
        (
            nn.Linear(3, 3),
            {"scaler": 3},
            r"attach\(scaler=int\): expected a torch\.amp\.GradScaler",
        ),
        (nn.Linear(3, 3), {"seed": "abc"}, r"attach\(seed='abc'\): must be an integer"),
        (nn.Linear(3, 3, device="meta"), {}, r"attach\(model\): weight is on the meta device"),
        (
            prune.identity(nn.Linear(3, 3), "weight"),
            {},
            r"attach\(model\): torch\.nn\.utils\.prune still masks weight",
        ),
        (nn.Linear(3, 3), {"exclude": [0]}, r"exclude=0: must be a name pattern"),
        (nn.Linear(3, 3), {"include": 3}, r"include=3: must be a name pattern"),
        (
            nn.Linear(3, 3),
            {"frozen": "no"},
            r"attach\(frozen='no'\): must be one of 'mask', 'skip'",
        ),
        (
            nn.Linear(3, 3),
            {"pretrained": "yes"},
            r"attach\(pretrained='yes'\): must be one of True",
        ),
    ],
)
def test_wrong_arguments_of_attach_raise(model, arguments, message):
    with pytest.raises(probmask.InputError, match=message):
        probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=1, **arguments)


@pytest.mark.parametrize("function", [probmask.find_sites, probmask.freeze_masks])
def test_a_class_instead_of_a_model_raises(function):
    message = rf"{function.__name__}\(model\): expected an nn\.Module, not the class Linear"
    with pytest.raises(probmask.InputError, match=message):
        function(nn.Linear)
