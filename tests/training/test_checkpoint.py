"""Checkpoints: any state is restored, damage is always detected, nothing is unpickled."""

import errno
import math
import os
import pickle
import random

import pytest
import torch

from probmask.errors import CheckpointError
from probmask.training.checkpoint import read_checkpoint, write_checkpoint


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoint.safetensors"


def nested():
    torch.manual_seed(0)
    return {
        "numbers": {"int": -(2**70), "float": 0.1 + 0.2, "true": True, "none": None, "": ""},
        "floats": [math.inf, -math.inf, 5e-324, -0.0, 1e308],
        "text": 'quote " slash \\ ünïcode \u2028 \x00 end',
        3: "a whole number as key",
        True: "collides with 1 nowhere",
        None: "even this",
        "list": [1, [2, (3, [])], {}],
        "tuple": (0.9, 0.999),
        "tensor": "not a tensor",
        "dict": {"list": {"tuple": [{"tensor": torch.arange(3)}]}},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}, 1: {}}, "param_groups": [{}]},
        "tensors": [
            torch.randn(3, 4),
            torch.randn(5).bfloat16(),
            torch.randn(5).half(),
            torch.randn(2, 2, dtype=torch.float64),
            torch.tensor([True, False, True]),
            torch.tensor(2**62),
            torch.tensor(True),
            torch.tensor(math.nan),
            torch.empty(0),
            torch.empty(2, 0, 3, dtype=torch.bool),
            torch.randn(6, 4).t(),
            torch.randn(4, 4)[::2, 1::2],
            torch.tensor(1.5).expand(3),
            torch.randint(256, (7,), dtype=torch.uint8),
        ],
    }


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*flat)
    elif isinstance(a, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert repr(a) == repr(b)


def test_any_state_is_read_back_unchanged(path):
    state = nested()
    write_checkpoint(path, state)
    assert_equal(read_checkpoint(path), state)


def test_a_parameter_is_read_back_as_a_plain_tensor(path):
    parameter = torch.nn.Parameter(torch.randn(3))
    write_checkpoint(path, {"w": parameter})
    found = read_checkpoint(path)["w"]
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert torch.equal(found, parameter.detach())


def test_tensors_stay_valid_after_the_file_is_replaced(path):
    write_checkpoint(path, {"w": torch.ones(5000)})
    first = read_checkpoint(path)["w"]
    write_checkpoint(path, {"w": torch.zeros(5000)})
    path.unlink()
    assert torch.equal(first, torch.ones(5000))


def test_the_state_of_an_optimizer_is_restored(path):
    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    write_checkpoint(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step(model, optimizer)

    state = read_checkpoint(path)
    twin = torch.nn.Linear(3, 3)
    twin.load_state_dict(state["model"])
    again = torch.optim.Adam(twin.parameters(), lr=0.1)
    again.load_state_dict(state["optimizer"])
    step(twin, again)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, torch.float32])
def test_an_unsupported_type_raises_and_the_old_file_stays(path, value):
    write_checkpoint(path, {"step": 1})
    with pytest.raises(TypeError, match="a checkpoint cannot store"):
        write_checkpoint(path, {"step": 2, "deep": [{"x": value}]})
    assert read_checkpoint(path) == {"step": 1}


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_only_the_old_file(path, monkeypatch, failing):
    write_checkpoint(path, {"step": 1, "w": torch.ones(3)})
    before = path.read_bytes()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(
            f"probmask.files.{'os.fsync' if failing == 'fsync' else 'Path.replace'}", fail
        )
        with pytest.raises(OSError, match="No space left"):
            write_checkpoint(path, {"step": 2, "w": torch.zeros(3)})
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert read_checkpoint(path)["step"] == 1


def test_every_flipped_bit_is_detected(path):
    write_checkpoint(path, {**nested(), "padding": torch.zeros(300)})
    good = path.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    chance = random.Random(0)
    positions = [
        *range(16),
        *(header + offset for offset in range(-8, 8)),
        *chance.sample(range(16, header - 8), 150),
        *chance.sample(range(header + 8, len(good)), 150),
        len(good) - 1,
    ]
    for position in positions:
        bad = bytearray(good)
        bad[position] ^= 1 << chance.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"checkpoint\.safetensors: ") as caught:
            read_checkpoint(path)
        assert "\n" not in str(caught.value), position


def test_every_truncated_file_is_detected(path):
    write_checkpoint(path, nested())
    good = path.read_bytes()
    lengths = {0, 1, 7, 8, 9, len(good) - 1, *random.Random(1).sample(range(len(good)), 60)}
    for length in lengths:
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            read_checkpoint(path)
    path.write_bytes(good + b"\x00")
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 100, pickle.dumps({"a": 1}), b"\x80\x02c__builtin__\nexit\n.", b"{}" * 8],
)
def test_any_other_file_raises_a_checkpoint_error(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_a_directory_or_a_missing_file_raises_a_checkpoint_error(path):
    with pytest.raises(CheckpointError):
        read_checkpoint(path)
    path.mkdir()
    with pytest.raises(CheckpointError):
        read_checkpoint(path)


def test_another_safetensors_file_is_not_a_checkpoint(path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of this version"):
        read_checkpoint(path)


def test_nothing_is_unpickled(path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("unpickled")

    for target in ("torch.load", "torch.serialization.load", "pickle.loads", "pickle.load"):
        monkeypatch.setattr(target, never)
    monkeypatch.setattr(pickle, "Unpickler", never)
    write_checkpoint(path, nested())
    assert_equal(read_checkpoint(path), nested())
