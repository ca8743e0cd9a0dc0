"""Exports that need only PyTorch: a dense state_dict, and sparse CSR tensors."""

import os
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file
from torch import nn

from probmask.artifact import export, load_into, load_state, save, to_csr
from probmask.cli import main
from probmask.errors import InputError
from reference.networks import NETWORKS, assert_same_state, build, state_of


def sparse(name):
    model = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.9, 0.0)
    return model


@pytest.fixture
def artifact(tmp_path):
    save(sparse("conv"), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", ["conv", "tied", "transformer"])
def test_dense_is_the_plain_state_dict(tmp_path, name):
    model = sparse(name)
    save(model, tmp_path / "m")
    done = export(tmp_path / "m", tmp_path / "dense.safetensors")
    assert (done.format, done.bytes) == ("dense", (tmp_path / "dense.safetensors").stat().st_size)
    plain = load_file(tmp_path / "dense.safetensors")  # by another reader, into NumPy
    assert plain.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert np.array_equal(plain[key], value.numpy())
    other = build(name, seed=3)
    other.load_state_dict({key: torch.from_numpy(value) for key, value in plain.items()})
    assert_same_state(state_of(other), state_of(model))


def test_dense_keeps_dtypes(tmp_path):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = sparse("mlp").to(dtype)
        save(model, tmp_path / "m", overwrite=True)
        export(tmp_path / "m", tmp_path / "d", format="dense", overwrite=True)
        assert_same_state(safetensors.torch.load_file(tmp_path / "d"), state_of(model))


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_torch_csr_holds_the_same_weights_and_loads_without_pickled_code(tmp_path, name):
    model = sparse(name)
    save(model, tmp_path / "m")
    assert export(tmp_path / "m", tmp_path / "m.pt").format == "torch-csr"
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    state, shapes = saved["state_dict"], saved["shapes"]
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        if value.dim() > 1:
            assert state[key].layout == torch.sparse_csr
            assert tuple(state[key].shape) == (value.shape[0], value[0].numel())
            assert state[key]._nnz() == int(value.count_nonzero())
            assert torch.equal(state[key].to_dense().reshape(shapes[key]), value)
        else:
            assert key not in shapes
            assert torch.equal(state[key], value)


def test_to_csr_returns_what_export_writes(artifact, tmp_path):
    export(artifact, tmp_path / "m.pt")
    saved = torch.load(tmp_path / "m.pt", weights_only=True)
    made = to_csr(load_state(artifact))
    assert made["shapes"] == saved["shapes"]
    for key, value in made["state_dict"].items():
        assert torch.equal(value.to_dense(), saved["state_dict"][key].to_dense())


def test_a_csr_weight_computes_what_the_layer_does():
    layer = nn.Linear(20, 10, bias=False)
    with torch.no_grad():
        layer.weight.masked_fill_(torch.rand_like(layer.weight) < 0.9, 0.0)
    matrix = to_csr(layer.state_dict())["state_dict"]["weight"]
    inputs = torch.randn(7, 20)
    assert torch.allclose((matrix @ inputs.T).T, layer(inputs), atol=1e-6)


def test_tensors_with_few_zeros_stay_dense():
    half = torch.eye(2)
    full = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    state = {
        "half": half,
        "full": full,
        "scalar": torch.zeros(()),
        "counts": torch.zeros(2, 2).int(),
    }
    made = to_csr(state)
    assert made["shapes"] == {"half": [2, 2]}
    assert all(made["state_dict"][key] is state[key] for key in ("full", "scalar", "counts"))


def test_tied_weights_share_their_matrix(tmp_path):
    save(sparse("tied"), tmp_path / "m")
    made = to_csr(load_state(tmp_path / "m"))
    assert made["state_dict"]["left.weight"] is made["state_dict"]["right.weight"]


def test_an_existing_file_is_replaced_only_with_force(artifact, tmp_path, capsys):
    out = tmp_path / "out.pt"
    out.write_text("precious")
    arguments = ["export", str(artifact), str(out)]
    assert main(arguments) == 2
    assert "pass --force" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert main([*arguments, "--force"]) == 0
    assert torch.load(out, weights_only=True)["shapes"]
    printed = capsys.readouterr()
    assert printed.out == f"{out}: torch-csr, {out.stat().st_size:,} bytes\n"
    assert printed.err == ""


@pytest.mark.parametrize(
    ("out", "more", "message"),
    [
        ("out", [], "pass format= (--format), or use a suffix of .onnx (onnx)"),
        ("out", ["--format", "tflite"], "one of 'onnx', 'dense', 'torch-csr'"),
        ("model.safetensors", ["--force"], "is the artifact itself"),
        ("no/such/out.pt", [], "cannot be written"),
        (".", ["--format", "dense"], "is a directory"),
        ("out.onnx", ["--input-shape", "1,a"], "expected the shape of one input, as in 3,32,32"),
        ("out.onnx", [], "does not record the input shape of its network"),
        ("out.onnx", ["--input-shape", "1,0"], "each at least 1"),
        ("out.onnx", ["--input-shape", "1,6,6"], "does not name its network"),
    ],
)
def test_invalid_input_prints_one_line_and_writes_no_file(
    artifact, tmp_path, capsys, out, more, message
):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["export", str(artifact), str(tmp_path / out), *more]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_link_to_the_artifact_is_the_artifact(artifact, tmp_path):
    (tmp_path / "link").symlink_to(artifact)
    with pytest.raises(InputError, match="is the artifact itself"):
        export(artifact, tmp_path / "link", format="dense", overwrite=True)
    load_into(build("conv"), artifact)


def test_a_missing_package_is_named_with_its_extra(artifact, tmp_path):
    """As after `pip install probmask` without extras."""
    script = (
        "import sys; sys.modules['onnxscript'] = None\n"
        "from probmask.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    (tmp_path / "own_small.py").write_text(
        "from torch import nn\ndef build(): return nn.Linear(2, 2)"
    )
    save(nn.Linear(2, 2), tmp_path / "own.safetensors", metadata={"model": "own_small:build"})
    arguments = ["export", "own.safetensors", "out.onnx", "--model", "own_small:build"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments, "--input-shape", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "probmask: onnxscript is not installed; run pip install 'probmask[onnx]'.\n"
    )
    assert not (tmp_path / "out.onnx").exists()
