"""ONNX: other runtimes agree with PyTorch for every batch size, and zeros stay zeros."""

import json
import sys

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from torch import nn

from probmask.artifact import export, load, read, save
from probmask.artifact.onnx import compare_with_onnxruntime, to_onnx
from probmask.cli import main
from probmask.data import load_data
from probmask.errors import InputError
from probmask.masking.sites import find_sites
from probmask.models import MODELS, build_model
from probmask.training.trainer import train
from training.small import small


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A sparse network trained on the digits."""
    config = small(epochs=12, batch_size=64, method__sparsity=0.8, model_args__width=12)
    return train(config, out=tmp_path_factory.mktemp("onnx") / "run")


@pytest.fixture(scope="module")
def artifact(run):
    return run.directory / "model.safetensors"


@pytest.fixture(scope="module")
def exported(artifact):
    out = artifact.with_name("model.onnx")
    return export(artifact, out)


@pytest.fixture(scope="module")
def expected(artifact):
    """The test images of the digits, their labels, and PyTorch's logits."""
    (batch,) = load_data("digits").testing(batch_size=1000)
    with torch.no_grad():
        return batch.inputs.numpy(), batch.labels.numpy(), load(artifact)(batch.inputs).numpy()


def by_onnxruntime(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: session.run(None, {"images": images})[0]


def by_openvino(path):
    # In fp32: on CPUs that compute in bf16, OpenVINO would do so by default.
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(path, "CPU", hints)
    return lambda images: compiled([images])[0]


RUNTIMES = {"onnxruntime": by_onnxruntime, "openvino": by_openvino}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_runtimes_agree_with_pytorch_on_all_test_images(runtime, run, exported, expected):
    images, labels, logits = expected
    answers = RUNTIMES[runtime](exported.path)(images)
    assert len(images) == 355
    assert np.array_equal(answers.argmax(1), logits.argmax(1))
    assert np.abs(answers - logits).max() < 1e-3
    correct = int((answers.argmax(1) == labels).sum())
    assert correct == run.record["test"]["correct"] > 0.8 * 355


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("size", [1, 3, 64])
def test_any_batch_size(runtime, size, exported, expected):
    images, _, logits = expected
    answers = RUNTIMES[runtime](exported.path)(images[:size])
    assert answers.shape == (size, 10)
    assert np.array_equal(answers.argmax(1), logits[:size].argmax(1))


def test_the_file_records_names_opset_and_metadata(artifact, exported):
    proto = onnx.load(exported.path)
    onnx.checker.check_model(proto, full_check=True)
    (images,), (logits,) = proto.graph.input, proto.graph.output
    assert [side.dim_value or side.dim_param for side in images.type.tensor_type.shape.dim] == [
        "batch", 1, 8, 8,
    ]  # fmt: skip
    assert (images.name, logits.name, proto.producer_name) == ("images", "logits", "probmask")
    assert proto.opset_import[0].version == 18
    noted = {item.key: item.value for item in proto.metadata_props}
    assert json.loads(noted["probmask"]) == read(artifact).metadata


def test_the_file_contains_no_paths_and_is_reproducible(artifact, exported):
    """The exporter adds the source file and line of each node."""
    written = exported.path.read_bytes()
    for trace in (b"site-packages", b".py", b"File "):
        assert trace not in written
    assert to_onnx(load(artifact), (1, 8, 8), metadata=read(artifact).metadata) == written


def nonzeros(data):
    """Return the number of non-zeros in all initializers with two or more dimensions."""
    weights = [item for item in onnx.load_from_string(data).graph.initializer if len(item.dims) > 1]
    return sum(int(np.count_nonzero(onnx.numpy_helper.to_array(item))) for item in weights)


def test_zeros_stay_zeros(run, exported):
    assert nonzeros(exported.path.read_bytes()) == run.record["kept"]


# The narrowest settings that still have every layer.
NETWORKS = {
    "conv4": ({"width": 4, "image_size": 8}, (3, 8, 8)),
    "vgg19": ({"width": 4}, (3, 32, 32)),
    "resnet32": ({"width": 4}, (3, 8, 8)),
    "mobilenetv1": ({"width": 4}, (3, 32, 32)),
    "resnet50": ({"width": 4}, (3, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_of_the_paper(name):
    settings, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = build_model(name, settings)
    sites = find_sites(model)
    with torch.no_grad():
        for site in sites:
            site.weight.masked_fill_(torch.rand(site.shape) < 0.5, 0.0)
        for _ in range(3):  # BatchNorm that is not the identity
            model.train()(torch.randn(8, *shape))
    data = to_onnx(model.eval(), shape)
    assert nonzeros(data) == sum(int(site.weight.count_nonzero()) for site in sites)
    found = compare_with_onnxruntime(data, model, shape)
    assert found.inputs == found.same_top1 == 64
    assert found.largest_difference < 1e-4 * max(1, found.largest_output)


def test_the_command_prints_the_comparison(artifact, tmp_path, capfd):
    out = tmp_path / "m.onnx"
    assert main(["export", str(artifact.parent), str(out)]) == 0
    printed = capfd.readouterr()
    first, second = printed.out.splitlines()
    assert first == f"{out}: onnx, {out.stat().st_size:,} bytes"
    assert second.startswith("ONNX Runtime against PyTorch on 64 random inputs: largest difference")
    assert second.endswith(", same top-1 class for 64")
    assert printed.err == ""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module with user-defined networks."""
    (tmp_path / "own_exported.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def plain(): return nn.Linear(5, 3)\n"
        "class Noisy(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) + torch.randn_like(x[:, :1])\n"
        "def noisy(): return Noisy(5, 3)\n"
        "class Branching(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x if x.sum() > 0 else -x)\n"
        "def branching(): return Branching(5, 3)\n"
        "class Fixed(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x) + torch.ones(len(x), 1)\n"
        "def fixed(): return Fixed(5, 3)\n"
        "class Pair(nn.Linear):\n"
        "    def forward(self, x): return super().forward(x), x\n"
        "def pair(): return Pair(5, 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    save(nn.Linear(5, 3), tmp_path / "m")
    yield tmp_path / "m"
    sys.modules.pop("own_exported", None)


def test_a_user_defined_network(own, tmp_path, capsys):
    out = tmp_path / "own.onnx"
    arguments = ["export", own, out, "--model", "own_exported:plain", "--input-shape", "5"]
    assert main([str(argument) for argument in arguments]) == 0
    assert "same top-1 class for 64" in capsys.readouterr().out
    inputs = torch.randn(7, 5)
    with torch.no_grad():
        expected = load(own, model="own_exported:plain")(inputs).numpy()
    assert np.allclose(by_onnxruntime(out)(inputs.numpy()), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("noisy", "the outputs of ONNX Runtime and PyTorch differ"),
        ("branching", "PyTorch cannot export this network to ONNX"),
        ("fixed", "uses its batch size as a constant"),
        ("pair", "its output is not one tensor"),
    ],
)
def test_a_network_that_cannot_be_exported_raises_with_one_line(own, tmp_path, name, message):
    with pytest.raises(InputError, match=message) as caught:
        export(own, tmp_path / "x.onnx", model=f"own_exported:{name}", input_shape=(5,))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.onnx").exists()


def test_an_input_shape_that_the_network_does_not_accept_raises(own, tmp_path):
    with pytest.raises(InputError, match=r"input_shape=\(4,\).*does not accept such an input"):
        export(own, tmp_path / "x.onnx", model="own_exported:plain", input_shape=(4,))


def test_without_a_recorded_input_shape_the_usual_one_is_used(tmp_path):
    model = build_model("smallconv", {"width": 4, "channels": 2})
    described = {"model": "smallconv", "model_args": {"width": 4, "channels": 2}}
    save(model, tmp_path / "m", metadata=described)
    export(tmp_path / "m", tmp_path / "m.onnx")
    (images,) = onnx.load(tmp_path / "m.onnx").graph.input
    shape = tuple(side.dim_value for side in images.type.tensor_type.shape.dim)
    assert shape[1:] == (2, *MODELS["smallconv"].image_shape[1:])


def test_a_huge_input_shape_in_the_file_raises(tmp_path):
    metadata = {"model": "smallconv", "model_args": {"width": 4}, "image_shape": [1, 10**5, 10**5]}
    save(build_model("smallconv", {"width": 4}), tmp_path / "m", metadata=metadata)
    with pytest.raises(InputError, match="at most 67,108,864 values"):
        export(tmp_path / "m", tmp_path / "x.onnx")
