"""The architectures: sizes and costs by layer, initial weights, export, and invalid arguments."""

import copy
import inspect
import math

import pytest
import torch
from torch import nn

from models import layer_counts
from probmask.errors import InputError
from probmask.masking.macs import count_macs
from probmask.masking.sites import find_sites
from probmask.models import MODELS, build_model, check_model_settings

IMAGES = [name for name, network in MODELS.items() if network.image_shape is not None]
PAPER = [name for name in IMAGES if name not in ("smallconv", "lenet300", "lenet5", "vit")]
# What a network needs to be narrow.
NARROW = {"bert": {"heads": 2, "layers": 2}, "vit": {"layers": 2}}
CIFAR_RESNETS = {"resnet14": (2, 16), "resnet20": (3, 16), "resnet32": (5, 32)}

# Name, classes, layers, weights, MACs, additions of average pooling.
COUNTS = [
    ("lenet300", 10, 3, 784 * 300 + 300 * 100 + 100 * 10, 266_200, 0),
    ("lenet5", 10, 4, 430_500, 2_293_000, 0),
    ("conv4", 10, 7, 2_425_024, 98_306_560, 0),
    ("resnet14", 10, 16, 174_128, 26_657_408, 64 * 8 * 8),
    ("resnet20", 10, 22, 270_896, 40_813_184, 64 * 8 * 8),
    ("resnet32", 10, 34, 1_855_584, 275_612_928, 128 * 8 * 8),
    ("resnet32", 100, 34, 1_867_104, 275_624_448, 128 * 8 * 8),
    ("vgg19", 10, 17, 20_024_000, 398_136_320, 512),
    ("vgg19", 100, 17, 20_070_080, 398_182_400, 512),
    ("mobilenetv1", 1000, 28, 4_209_088, 568_740_352, 1024 * 7 * 7),
    ("resnet50", 1000, 54, 25_502_912, 4_089_284_608 - 100_352, 100_352),
]


def described(name, **settings):
    """The expected layers of a network, from `layer_counts`."""
    if name in CIFAR_RESNETS:
        blocks, width = CIFAR_RESNETS[name]
        return layer_counts.cifar_resnet(blocks, **{"width": width, **settings})
    return getattr(layer_counts, name)(**settings)


def on_meta(name, **settings):
    with torch.device("meta"):
        return build_model(name, settings)


def meta_images(side, *, channels=3):
    return torch.empty(1, channels, side, side, device="meta")


def small(name, **settings):
    """A narrow network in evaluation mode, and three images of at most 64×64, or sentences."""
    torch.manual_seed(0)
    model = build_model(name, {"width": 4, "classes": 7, **NARROW.get(name, {}), **settings}).eval()
    if name not in IMAGES:
        return model, torch.randint(20_000, (3, 6))
    channels, side, _ = MODELS[name].image_shape
    return model, torch.randn(3, channels, min(side, 64), min(side, 64))


@pytest.mark.parametrize(("name", "classes", "layers", "weights", "macs", "pooling"), COUNTS)
def test_size_and_cost(name, classes, layers, weights, macs, pooling):
    model = on_meta(name, classes=classes)
    sites = find_sites(model)
    channels, side, _ = MODELS[name].image_shape
    counted = count_macs(model, sites, meta_images(side, channels=channels))
    expected = described(name, classes=classes)
    # Sites are in module order, where a shortcut follows the other layers of its block.
    assert [site.size for site in sites] == [layer.weights for layer in expected]
    assert counted.per_weight == tuple(layer.positions for layer in expected)
    assert (len(sites), sum(counted.sizes)) == (layers, weights)
    assert counted.dense == sum(layer.weights * layer.positions for layer in expected) == macs
    assert counted.pooling == pooling
    # All other parameters belong to BatchNorm: there are no biases.
    others = sum(p.numel() for p in model.parameters()) - weights
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert others == sum(2 * norm.num_features for norm in norms)
    assert len(norms) == (0 if name == "conv4" else layers - 1)


def test_the_macs_are_those_of_the_literature():
    """MACs rounded as in the papers; STR's figure for ResNet50 includes pooling."""
    macs = {(name, classes): count for name, classes, _, _, count, _ in COUNTS}
    assert round(macs["conv4", 10] / 1e6, 1) == 98.3
    assert round(macs["vgg19", 10] / 1e6, 1) == 398.1
    assert round(macs["resnet32", 10] / 1e6, 1) == 275.6
    assert round(macs["mobilenetv1", 1000] / 1e6, 1) == 568.7
    model = on_meta("resnet50")
    counted = count_macs(model, find_sites(model), meta_images(224))
    assert counted.dense_with_pooling == 4_089_284_608


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("width", [1, 12])
def test_every_layer_scales_with_the_width(name, width):
    model = on_meta(name, width=width, classes=3)
    sites = find_sites(model)
    counted = count_macs(model, sites, meta_images(64 if name != "conv4" else 32))
    expected = described(name, width=width, classes=3, side=64 if name != "conv4" else 32)
    assert [site.size for site in sites] == [layer.weights for layer in expected]
    assert counted.per_weight == tuple(layer.positions for layer in expected)


def test_depthwise_layers_of_mobilenet_are_masked_too():
    sites = find_sites(on_meta("mobilenetv1"))
    depthwise = [site.size for site in sites if site.holders[0][0].groups > 1]
    assert len(depthwise) == 13
    assert sum(depthwise) == 44_640


@pytest.mark.parametrize("name", CIFAR_RESNETS)
def test_a_stem_of_stride_two_halves_every_side_and_nothing_else(name):
    plain, halved = on_meta(name), on_meta(name, stem_stride=2)
    shapes = [[site.shape for site in find_sites(model)] for model in (plain, halved)]
    assert shapes[0] == shapes[1]
    counts = count_macs(halved, find_sites(halved), meta_images(32)).per_weight
    assert counts == tuple(layer.positions for layer in described(name, side=16))


@pytest.mark.parametrize("name", CIFAR_RESNETS)
def test_padded_shortcuts_have_no_weights(name):
    """Every second pixel, between channels of zeros."""
    padded = on_meta(name, shortcut="pad")
    by_shape = sorted(site.size for site in find_sites(padded))
    conv_shortcuts = [site for site in find_sites(on_meta(name)) if "shortcut" in site.name]
    assert len(conv_shortcuts) == 2
    rest = [site.size for site in find_sites(on_meta(name)) if "shortcut" not in site.name]
    assert by_shape == sorted(rest)
    images = torch.arange(2 * 4 * 4.0).view(1, 2, 4, 4)
    shortcut = build_model(name, {"shortcut": "pad", "width": 2}).stages[1][0].shortcut
    out = shortcut(images)
    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[:, 1:3], images[:, :, ::2, ::2])
    assert not out[:, [0, 3]].any()


def test_the_layers_of_the_transformers():
    """Per block 3 + 1 + 4 + 4 matrices of width × width; the embeddings are not sites."""
    for name, layers, width, further in (
        ("vit", 6, 192, [192 * 3 * 4 * 4, 192 * 10]),
        ("text_encoder", 2, 128, [128 * 2]),
        ("bert", 6, 384, []),
    ):
        model = on_meta(name)
        sites = find_sites(model, exclude=MODELS[name].exclude)
        assert sum(site.size for site in sites) == 12 * layers * width**2 + sum(further)
        attention = 4 if name == "bert" else 2  # query, key and value are one matrix elsewhere
        assert len(sites) == layers * (attention + 2) + len(further)


def test_bert_computes_the_same_as_transformers():
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = library.BertConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=20,
        num_labels=3,
    )
    theirs = library.BertForSequenceClassification(config)
    settings = {"vocabulary": 50, "width": 24, "layers": 2, "heads": 4, "positions": 20}
    ours = build_model("bert", settings | {"classes": 3})
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    ids, mask = torch.randint(50, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        expected = theirs.eval()(**inputs).logits
        assert torch.allclose(ours.eval()(**inputs), expected, atol=1e-6)
        assert torch.allclose(ours(ids[:1]), expected[:1], atol=1e-6)  # without padding
    with pytest.raises(InputError, match="21 tokens, but it was built for positions=20"):
        ours(torch.zeros(1, 21, dtype=torch.long))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, r"vit\(width=192, heads=5\): the heads share the width evenly"),
        ({"patch": 5}, r"vit\(image_size=32, patch=5\): the patches cover the images"),
        ({"image_size": [32, 30]}, "choose a divisor of height and width"),
    ],
)
def test_vit_rejects_sizes_that_do_not_divide(settings, message):
    with pytest.raises(InputError, match=message):
        MODELS["vit"].build(**settings)


@pytest.mark.parametrize("name", IMAGES)
def test_one_logit_per_class_for_any_number_of_channels(name):
    _, images = small(name)
    heads = {"heads": 2} if name == "vit" else {}
    model = build_model(name, {"width": 2, "classes": 5, "channels": 2, **heads})
    assert model(images[:, :1].expand(-1, 2, -1, -1)).shape == (3, 5)


@pytest.mark.parametrize("name", [n for n in PAPER if n != "conv4"])
def test_images_of_other_sizes_are_accepted(name):
    model, _ = small(name)
    assert model(torch.randn(2, 3, 33, 70)).shape == (2, 7)


@pytest.mark.parametrize(
    ("size", "shape"), [(28, (28, 28)), ([16, 40], (16, 40)), ((5, 4), (5, 4))]
)
def test_conv4_takes_the_image_size(size, shape):
    model = build_model("conv4", {"width": 2, "image_size": size})
    assert model(torch.randn(2, 3, *shape)).shape == (2, 10)
    assert model.classifier[0].in_features == 4 * (shape[0] // 4) * (shape[1] // 4)


@pytest.mark.parametrize("name", PAPER)
def test_initial_weights_follow_the_distribution_of_the_paper(name):
    torch.manual_seed(0)
    model = build_model(name, {"width": 16, "classes": 10})
    for site in find_sites(model):
        weight = site.weight.detach()
        deviation = math.sqrt(2 / weight[0].numel())
        # Five standard errors of the estimates.
        error = 5 / math.sqrt(site.size)
        assert weight.std().item() == pytest.approx(deviation, rel=error / math.sqrt(2)), site.name
        assert abs(weight.mean().item()) < error * deviation, site.name
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert torch.equal(norm.weight, torch.ones_like(norm.weight))
            assert torch.equal(norm.bias, torch.zeros_like(norm.bias))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_network(name):
    (one, _), (other, _) = small(name), small(name)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model, images = small(name)
    model.train()
    labels = torch.tensor([0, 3, 6])
    nn.functional.cross_entropy(model(images), labels).backward()
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
        assert parameter.grad.abs().sum() > 0, path


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_the_same(name):
    model, images = small(name)
    assert torch.equal(copy.deepcopy(model)(images), model(images))


@pytest.mark.parametrize("name", IMAGES)
def test_the_meta_device_computes_shapes_only(name):
    channels, side, _ = MODELS[name].image_shape
    model = on_meta(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    out = model.eval()(meta_images(side, channels=channels))
    assert out.is_meta
    assert out.shape == (1, MODELS[name].classes[0])


@pytest.mark.parametrize("name", MODELS)
def test_export_with_any_batch_size(name):
    model, images = small(name)
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (images[:2],), dynamic_shapes=({0: batch},))
    for size in (1, 3):
        assert torch.allclose(program.module()(images[:size]), model(images[:size]), atol=1e-5)


@pytest.mark.parametrize("name", IMAGES)
def test_a_symbolic_trace_computes_the_same(name):
    model, images = small(name)
    assert torch.equal(torch.fx.symbolic_trace(model)(images), model(images))


@pytest.mark.parametrize("name", ["smallconv", "lenet5", "vgg19", "conv4", "vit"])
def test_dynamo_captures_a_network_that_checks_its_image_size_as_one_graph(name):
    model, images = small(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), model(images))


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("argument", ["classes", "channels", "width"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True, None])
def test_an_invalid_size_raises(name, argument, value):
    with pytest.raises(InputError) as caught:
        MODELS[name].build(**{argument: value})
    assert str(caught.value).startswith(f"{name}({argument}={value!r}): ")
    assert str(caught.value).endswith("an integer of at least 1.")
    with pytest.raises(InputError) as checked:
        build_model(name, {argument: value})
    assert str(checked.value) == f"--model {caught.value}"


@pytest.mark.parametrize("name", MODELS)
def test_invalid_settings_raise_before_the_network_is_built(name):
    for argument in inspect.signature(MODELS[name].build).parameters:
        with pytest.raises(InputError) as caught:
            MODELS[name].build(**{argument: -1})
        with pytest.raises(InputError) as checked:
            check_model_settings(name, {argument: -1}, naming="--model")
        assert str(checked.value) == str(caught.value).replace(name, "model_args", 1)


@pytest.mark.parametrize("name", CIFAR_RESNETS)
@pytest.mark.parametrize("value", [0, 3, 1.0, "2", True])
def test_a_stem_stride_is_one_or_two(name, value):
    with pytest.raises(InputError, match=rf"{name}\(stem_stride="):
        MODELS[name].build(stem_stride=value)


@pytest.mark.parametrize(("size", "accepted"), [(15, False), (16, True), ([16, 28], True)])
def test_lenet5_needs_images_of_16_pixels(size, accepted):
    if accepted:
        sides = size if isinstance(size, list) else [size, size]
        assert MODELS["lenet5"].build(width=2, image_size=size)(
            torch.randn(2, 1, *sides)
        ).shape == (2, 10)
    else:
        with pytest.raises(InputError, match=r"lenet5\(image_size=15\)"):
            MODELS["lenet5"].build(image_size=size)


@pytest.mark.parametrize("size", [3, 0, "32", None, 32.0, [32, 3], [32], [32, 32, 3], []])
def test_conv4_rejects_an_invalid_image_size(size):
    with pytest.raises(InputError, match=r"conv4\(image_size="):
        MODELS["conv4"].build(image_size=size)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "vgg19",
            (28, 28),
            "vgg19: the images are 28×28, but its pooling layers need .* 32×32;",
        ),
        (
            "vgg19",
            (32, 31),
            "vgg19: the images are 32×31, but its pooling layers need .* 32×32;",
        ),
        (
            "vgg19",
            (31, 64),
            "vgg19: the images are 31×64, but its pooling layers need .* 32×32;",
        ),
        (
            "smallconv",
            (3, 8),
            "smallconv: the images are 3×8, but its pooling layers need .* 4×4;",
        ),
        ("conv4", (28, 32), r"it was built for 32×32; build it with image_size=\[28, 32\]"),
        ("vit", (28, 32), r"it was built for 32×32; build it with image_size=\[28, 32\]"),
        ("conv4", (32, 33), r"it was built for 32×32; build it with image_size=\[32, 33\]"),
    ],
)
def test_images_of_the_wrong_size_raise(name, shape, message):
    model, images = small(name)
    with pytest.raises(InputError, match=message):
        model(torch.randn(2, images.shape[1], *shape))
