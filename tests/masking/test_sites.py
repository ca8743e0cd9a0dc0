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


def test_a_parameter_of_the_users_own_module():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ self.matrix

    model = nn.Sequential(Scale(), nn.Linear(4, 4))
    assert names(model) == ["1.weight"]
    method = probmask.TiedProbMask(sparsity=0.75, min_keep_per_layer=1)
    sparsifier = probmask.attach(model, method, total_steps=1, include=["*.matrix"])
    summary = sparsifier.finalize()
    assert [layer.name for layer in summary.layers] == ["0.matrix", "1.weight"]
    assert summary.kept == 8
    assert model[0].matrix.count_nonzero() == summary.layers[0].kept


def test_recurrent_layers_raise():
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 4), "head": nn.Linear(4, 2)})
    assert names(model) == ["head.weight"]
    with pytest.raises(
        probmask.InputError, match=r"include='lstm\.weight_ih_l0': LSTM cannot be masked"
    ):
        names(model, include=["lstm"])


def recurrent_classifier():
    return nn.ModuleDict({"gru": nn.GRU(64, 64), "head": nn.Linear(64, 10)})


def test_attach_names_the_matrices_that_it_does_not_mask():
    model = recurrent_classifier()
    with pytest.warns(probmask.UnmaskedWeightsWarning) as caught:
        sparsifier = probmask.attach(model, probmask.TiedProbMask(sparsity=0.9), total_steps=1)
    (warning,) = caught
    assert str(warning.message).startswith(
        "attach(model): 24,576 weights will not be masked: gru.weight_ih_l0 (12,288), "
        "gru.weight_hh_l0 (12,288). The sparsity is that of the other 640 weights."
    )
    assert warning.filename == __file__
    summary = sparsifier.finalize()
    assert (summary.kept, summary.size, summary.sparsity) == (64, 640, 0.9)
    assert (summary.network.kept, summary.network.size) == (64 + 24_576, 640 + 24_576)
    assert str(summary).splitlines()[-2:] == [
        "all: 64 of 640 kept, 90.00 % sparse",
        "with gru.weight_ih_l0, gru.weight_hh_l0, not masked: 24,640 of 25,216 kept, 2.28 % sparse",
    ]


@pytest.mark.parametrize("kind", [list, iter, "".join])
def test_excluded_matrices_are_counted_without_a_warning(kind):
    model = recurrent_classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier = probmask.attach(
            model, probmask.TiedProbMask(sparsity=0.9), total_steps=1, exclude=kind(["gru"])
        )
    assert sparsifier.summary().network.size == 25_216


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_raise(kind):
    model = nn.Sequential(kind(5, 4, sparse=True), nn.Linear(4, 2))
    assert names(model) == ["1.weight"]
    with pytest.raises(
        probmask.InputError, match=r"include='0\.weight'.*build it with sparse=False"
    ):
        names(model, include=["0"])


def test_a_recurrent_cell_can_be_masked():
    cell = nn.LSTMCell(4, 4)
    sparsifier = probmask.attach(
        cell, probmask.TiedProbMask(sparsity=0.5), total_steps=1, include=["weight_*"]
    )
    cell.eval()
    assert cell.weight_ih.count_nonzero() + cell.weight_hh.count_nonzero() == 64
    hidden, _ = cell(torch.randn(2, 4))
    assert hidden.isfinite().all()
    assert sparsifier.finalize().kept == 64


def test_attaching_twice_raises():
    model = mlp()
    probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=5)
    with pytest.raises(probmask.InputError, match=r"already masked; finalize the earlier"):
        probmask.attach(model, probmask.TiedProbMask(sparsity=0.5), total_steps=5)


def test_a_layer_with_a_torch_parametrization_raises():
    """The layer would stay dense, and the sparsity would differ from the requested one."""
    model = mlp()
    parametrizations.weight_norm(model[2])
    with pytest.raises(probmask.InputError, match=r"2.*parametrization of torch.*exclude="):
        names(model)


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


def test_a_weight_that_a_hook_computes_raises():
    """torch.nn.utils.weight_norm leaves weight_g and weight_v, and no parameter weight."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model[0])
    with pytest.raises(
        probmask.InputError, match=r"0\.weight from weight_g and weight_v.*exclude='0'"
    ):
        names(model)
    assert names(model, exclude=["0"]) == ["1.weight"]


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
