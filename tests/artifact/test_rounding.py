"""Weights rounded to fp16: `save(values="fp16")`."""

import math

import pytest
import torch
from torch import nn

from probmask import artifact
from probmask.errors import InputError
from reference.artifact_reader import read_artifact


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def sparse_model(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 90), nn.BatchNorm1d(90), nn.Linear(90, 7)).to(dtype)
    with torch.no_grad():
        model[0].weight.masked_fill_(torch.rand_like(model[0].weight) < 0.9, 0.0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_rounded_and_other_tensors_stay_exact(path, dtype):
    model = sparse_model(dtype)
    info = artifact.save(model, path, values="fp16")
    state = artifact.load_state(path)
    errors = []
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype
        expected = tensor.half().to(dtype) if tensor.dim() == 2 else tensor
        assert torch.equal(state[name], expected), name
        plain = read_artifact(path)[0][name][2]
        assert plain == state[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        errors.append((expected - tensor).double().abs().max().item())
    assert info.rounding["values"] == "fp16"
    assert info.rounding["max_error"] == pytest.approx(max(errors))
    assert 0 < info.rounding["relative_error"] < 2**-11
    assert info == artifact.read(path)
    exact = artifact.save(model, path.with_name("exact"))
    assert exact.rounding is None
    assert info.file_bytes < exact.file_bytes


def test_fp16_and_bf16_tensors_stay_exact(path):
    for dtype in (torch.float16, torch.bfloat16):
        model = sparse_model(dtype)
        artifact.save(model, path, values="fp16", overwrite=True)
        for name, tensor in model.state_dict().items():
            assert torch.equal(artifact.load_state(path)[name], tensor), name


def test_no_kept_weight_becomes_zero(path):
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.tensor([[1e-9, -1e-30, 0.0]])
    info = artifact.save(model, path, values="fp16")
    assert artifact.load_state(path)["weight"].tolist() == [[2**-24, -(2**-24), 0.0]]
    assert info.tensors[0].nnz == 2


def test_a_weight_beyond_fp16_raises_and_no_file_is_written(path):
    model = nn.Linear(2, 1)
    model.weight.data = torch.tensor([[1.0, -70000.0]])
    reason = (
        r"save\(values='fp16'\): weight contains -70000, and the largest fp16 number is 65504; "
        "save without values="
    )
    with pytest.raises(InputError, match=reason):
        artifact.save(model, path, values="fp16")
    assert not path.exists()


def test_infinities_and_nans_stay(path):
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.tensor([[math.inf, -math.inf, math.nan]])
    info = artifact.save(model, path, values="fp16")
    assert str(artifact.load_state(path)["weight"].tolist()) == "[[inf, -inf, nan]]"
    assert info.rounding["max_error"] == info.rounding["relative_error"] == 0


def test_results_of_measure_are_recorded(path):
    model = sparse_model().eval()
    inputs = torch.randn(20, 80)
    seen = []

    def measure(network):
        seen.append(network)
        with torch.no_grad():
            return float(network(inputs).sum())

    info = artifact.save(model, path, values="fp16", measure=measure)
    assert seen[0] is model
    assert info.rounding["before"] == measure(model)
    back = artifact.load_into(sparse_model(), path).eval()
    assert info.rounding["after"] == measure(back) != info.rounding["before"]


def test_an_existing_file_raises_before_measuring(path):
    artifact.save(sparse_model(), path)
    with pytest.raises(InputError, match="exists; pass overwrite=True"):
        artifact.save(
            sparse_model(), path, values="fp16", measure=lambda _: pytest.fail("too late")
        )


@pytest.mark.parametrize("result", [None, math.nan, "high", torch.tensor(1.0)])
def test_a_result_of_measure_must_be_a_finite_number(path, result):
    with pytest.raises(
        InputError, match=r"save\(measure=...\): returned .*; expected a finite number"
    ):
        artifact.save(sparse_model(), path, values="fp16", measure=lambda _: result)
    assert not path.exists()


def test_invalid_arguments_raise(path):
    with pytest.raises(
        InputError, match=r"save\(values='int9'\): must be one of None, 'fp16', 'int8'"
    ):
        artifact.save(sparse_model(), path, values="int9")
    with pytest.raises(InputError, match="nothing is rounded; pass values='int8' too"):
        artifact.save(sparse_model(), path, measure=lambda _: 1.0)
