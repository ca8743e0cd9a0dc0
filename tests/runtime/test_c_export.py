"""A network as a C program: it compiles without warnings and agrees with the engine and PyTorch.

`make test-c` installs all compilers and emulators. Tests of those that are missing are skipped.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import probmask
from probmask import models
from probmask.cli import main
from probmask.errors import InputError
from probmask.runtime.c.c_operations import CALLS, CURVES
from probmask.runtime.kernels.operation_table import Curve, Kind
from runtime.comparing import assert_close
from runtime.networks import EverythingInOne, Wide, masked, one_dimensional
from runtime.random_networks import RandomNetwork, RandomTokens
from runtime.rearranging import REARRANGING

# PyTorch warns about the copy that it makes for even kernel sizes.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
# Operations of the engine that cannot be exported to C, with the reason.
UNSUPPORTED = {
    Kind.PACK_TOKENS: "tokens run for one image at a time in C",
}
WARNINGS = ("-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-ffp-contract=fast")
WASM = ("--target=wasm32", "-msimd128", "-ffreestanding")


@dataclass(frozen=True)
class Toolchain:
    """A compiler, the flags for its target, and the program that runs the result."""

    compiler: str
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()

    def skip_if_missing(self):
        needed = (self.compiler, *self.runner[:1], *self.tools)
        missing = [tool for tool in needed if shutil.which(tool) is None]
        if missing:
            pytest.skip(f"{', '.join(missing)} not installed; make test-c installs it")


TOOLCHAINS = {
    "gcc": Toolchain("gcc", ("-march=native",)),
    "gcc without extensions": Toolchain("gcc", ("-DPM_PLAIN",)),
    "clang": Toolchain("clang", ("-march=native",)),
    "aarch64": Toolchain("aarch64-linux-gnu-gcc", ("-static",), ("qemu-aarch64",)),
    "arm": Toolchain("arm-linux-gnueabihf-gcc", ("-static", "-mfpu=neon"), ("qemu-arm",)),
    "wasm": Toolchain("clang", WASM, ("node",), ("wasm-ld",)),
}


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """Return a function that compiles a program; the kernels are compiled once per toolchain."""

    @cache
    def kernels(toolchain):
        directory = tmp_path_factory.mktemp("kernels")
        probmask.runtime.export_c(nn.Linear(2, 2), directory, torch.zeros(1, 2))
        level = "-O3" if toolchain == TOOLCHAINS["gcc"] else "-O1"  # the others save time
        command = (toolchain.compiler, *WARNINGS, level, *toolchain.flags, "-c", "kernels.c")
        subprocess.run(command, cwd=directory, check=True)
        return str(directory / "kernels.o")

    def compiled(directory, toolchain):
        """Compile and link the program; return the command that runs it."""
        objects = [kernels(toolchain), "network.c"]
        command = [toolchain.compiler, *WARNINGS, "-O1", *toolchain.flags]
        if toolchain.flags != WASM:
            made = [*command, "-o", "network", "main.c", *objects]
            subprocess.run(made, cwd=directory, check=True)
            return [*toolchain.runner, "./network"]
        command += ["-nostdlib", "-Wl,--no-entry", "-Wl,--export=run", "-o", "network.wasm"]
        subprocess.run([*command, *objects], cwd=directory, check=True)
        return [*toolchain.runner, "run.mjs"]

    return compiled


def run(command, directory, inputs, expected):
    """Run a program twice in a row on inputs; return both results in the form of the expected."""
    raw = b"".join(
        (tensor if tensor.is_floating_point() else tensor.int()).numpy().tobytes()
        for tensor in inputs
    )
    done = subprocess.run(command, cwd=directory, input=2 * raw, stdout=subprocess.PIPE, check=True)
    leaves, spec = pytree.tree_flatten(expected)
    results = []
    for numbers in np.frombuffer(done.stdout, np.float32).reshape(2, -1):
        parts = np.split(numbers, np.cumsum([leaf.numel() for leaf in leaves])[:-1])
        tensors = [
            torch.from_numpy(part.copy()).reshape(leaf.shape)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        results.append(pytree.tree_unflatten(tensors, spec))
    return results


def assert_agrees(model, *inputs, directory, build, toolchain=TOOLCHAINS["gcc"]):
    """Check the C program against PyTorch, at the first call and at the second."""
    with torch.no_grad():
        expected = model(*inputs)
    probmask.runtime.export_c(model, directory, inputs)
    for result in run(build(directory, toolchain), directory, inputs, expected):
        assert_close(result, expected)


class Residual(nn.Module):
    """Strides, padding and both kinds of shortcut of a ResNet."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8))
        self.down, self.deep = nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, padding=1)
        self.shortcut, self.norm = nn.Conv2d(8, 12, 1, 2), nn.BatchNorm2d(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.first(x).relu()
        x = (x + self.second(x)).relu()
        x = (self.shortcut(x) + self.norm(self.deep(self.down(x).relu()))).relu()
        return self.head(x.mean((2, 3)))


def depthwise():
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.Conv2d(8, 16, 1), nn.Hardswish(), nn.Conv2d(16, 16, 5, 2, 2, groups=16), nn.SiLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6)),
    )


class Enlarging(nn.Module):
    """Transposed convolution, interpolation, GroupNorm, a channel gate and softmax of images."""

    def __init__(self):
        super().__init__()
        self.first, self.gate = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 8)
        self.up, self.norm = nn.ConvTranspose2d(8, 6, 3, 2, 1, 1), nn.GroupNorm(2, 6)
        self.last, self.prelu = nn.Conv2d(12, 5, 3, padding=1), nn.PReLU(5, 0.3)
        self.wide = nn.Upsample(scale_factor=(2, 2.5), mode="bilinear")

    def forward(self, x):
        x = nn.functional.mish(self.first(x))
        x = x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]
        y = nn.functional.elu(self.norm(self.up(x)), 0.7)
        y = torch.cat([y, nn.functional.leaky_relu(y, 0.2).tanh()], 1)
        y = self.wide(nn.functional.hardsigmoid(self.prelu(self.last(y))))
        return self.last(torch.cat([y, y, y[:, :2]], 1)).softmax(1), y.mean((2, 3)).softmax(-1)


class Volumes(nn.Module):
    """Convolutions and pooling of volumes, down to one position."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8)
        self.down = nn.Conv3d(8, 6, (2, 3, 3), stride=(1, 2, 2), dilation=(2, 1, 1), groups=2)
        self.single = nn.Conv3d(6, 6, (3, 2, 2), padding=(1, 0, 0))

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.first(x)))
        x = nn.functional.max_pool3d(x, (3, 2, 2), (1, 2, 2), (1, 0, 0)) + 1
        x = self.down(x).relu()
        y = nn.functional.avg_pool3d(x, 2, 1)
        return y, self.single(x)


def mlp():
    layers = (nn.Linear(64, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 10), nn.GELU())
    return nn.Sequential(nn.Flatten(), *layers)


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    """Causal attention, attention with a constant mask, RMSNorm, a gate, and a second input."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(24), nn.Linear(24, 48)
        self.mix, self.out, self.down = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 24)
        self.register_buffer("mask", torch.rand(21, 21) < 0.7)

    def attend(self, x, **settings):
        q, k, v = (part.unflatten(2, (3, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, **settings)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, other):
        x = x + self.attend(self.norm(x), is_causal=True)
        x = x + self.attend(x, attn_mask=self.mask)
        a, b = self.gate(x + other).chunk(2, -1)
        return x + self.down(nn.functional.silu(a) * b), x


class Sentences(nn.Module):
    """Tokens and a mask of the keys that are not padding; a view of the result is returned."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(30, 16), nn.Parameter(torch.randn(9, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 24, activation="gelu", batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens, mask):
        x = self.words(tokens) + self.places
        q = x.unflatten(2, (2, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q, mask[:, None, None].bool())
        x = self.layer(x + y.transpose(1, 2).flatten(2))
        return self.head(x[:, 0]), x.transpose(1, 2)


class Recurrent(nn.Module):
    """Two layers of an LSTM in both directions, a GRU and an RNN, with their final states."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 19, 2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(38, 7, batch_first=True), nn.RNN(7, 18, batch_first=True)

    def forward(self, x):
        y, (hidden, cell) = self.lstm(x)
        z, _ = self.gru(y)
        return self.rnn(z)[0], hidden, cell


NETWORKS = {
    "smallconv": (lambda: models.smallconv(width=8), (2, 1, 8, 8)),
    "residual": (Residual, (1, 3, 15, 12)),
    "depthwise": (depthwise, (1, 3, 21, 17)),
    "everything": (EverythingInOne, (3, 3, 31, 29)),
    "blocks of channels": (Wide, (1, 3, 24, 24)),
    "one dimension": (one_dimensional, (3, 3, 50)),
    "enlarging": (Enlarging, (3, 3, 9, 14)),
    "mlp": (mlp, (1, 1, 8, 8)),
    "mlp in groups": (mlp, (24, 1, 8, 8)),
    "encoder": (encoder, (2, 19, 32)),
    "recurrent": (Recurrent, (2, 21, 5)),
    "volumes": (Volumes, (2, 2, 5, 11, 11)),
    **{name: (make, (2, *shape)) for name, (make, shape) in REARRANGING.items()},
}


def network(name, sparsity=0.7):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    return masked(make(), sparsity), torch.randn(shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_program_agrees_with_the_engine_and_pytorch(tmp_path, build, name):
    TOOLCHAINS["gcc"].skip_if_missing()
    model, x = network(name)
    assert_agrees(model, x, directory=tmp_path, build=build)
    engine = probmask.runtime.compile(model, x, layers="sparse", threads=1)
    expected = engine(x)
    for result in run(["./network"], tmp_path, [x], expected):
        assert_close(result, expected, tolerance=2e-6)


def test_several_inputs_a_mask_and_causal_attention(tmp_path, build):
    TOOLCHAINS["gcc"].skip_if_missing()
    torch.manual_seed(0)
    model = masked(Decoder(), 0.5)
    assert_agrees(
        model, torch.randn(2, 21, 24), torch.randn(2, 21, 24), directory=tmp_path, build=build
    )
    assert (
        "run(const float *in_x, const float *in_other, float *out_0, float *out_1)"
        in (tmp_path / "network.h").read_text()
    )


def test_tokens_and_a_padding_mask(tmp_path, build):
    TOOLCHAINS["gcc"].skip_if_missing()
    torch.manual_seed(0)
    lengths = torch.tensor([[9], [5], [0]])  # nothing is attended to in the last sentence
    tokens, mask = torch.randint(30, (3, 9)), (torch.arange(9) < lengths).long()
    assert_agrees(masked(Sentences(), 0.5), tokens, mask, directory=tmp_path, build=build)
    assert "const int32_t *in_tokens" in (tmp_path / "network.h").read_text()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [RandomNetwork, RandomTokens])
def test_random_networks(tmp_path, build, kind, seed):
    """Operations without a kernel are refused; the others agree."""
    TOOLCHAINS["gcc"].skip_if_missing()
    model = kind(seed).eval()
    x = torch.randn(4, *model.input_shape, generator=torch.Generator().manual_seed(seed))
    try:
        assert_agrees(model, x, directory=tmp_path, build=build)
    except InputError as error:
        assert "no kernel" in str(error) or "an output" in str(error)  # noqa: PT017


@pytest.mark.parametrize("name", ["everything", "encoder"])
@pytest.mark.parametrize("toolchain", [name for name in TOOLCHAINS if name != "gcc"])
def test_other_compilers_and_processors(tmp_path, build, toolchain, name):
    TOOLCHAINS[toolchain].skip_if_missing()
    model, x = network(name)
    assert_agrees(model, x, directory=tmp_path, build=build, toolchain=TOOLCHAINS[toolchain])


def test_every_operation_has_a_kernel_in_c_or_a_reason():
    """A new kind of operation needs a C kernel (c_operations.CALLS), or a line in UNSUPPORTED."""
    assert set(CALLS) | set(UNSUPPORTED) == set(Kind)
    assert not set(CALLS) & set(UNSUPPORTED)
    assert set(CURVES) == set(Curve)


def test_an_operation_without_a_kernel_is_refused_by_name(tmp_path):
    class Sorted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x).sort(-1).values

    with pytest.raises(InputError, match=r"export_c: sort \(sort.default\) and .* have no kernel"):
        probmask.runtime.export_c(Sorted(), tmp_path / "out", torch.zeros(1, 4))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (nn.Linear(3, 3).double(), torch.zeros(1, 3).double(), "takes input of float64, but a C"),
        (nn.Identity(), torch.zeros(1, 3), "an output of the network is a constant or one of"),
        (nn.Linear(3, 3), torch.zeros(0, 3), r"export_c\(example=…\): the example is empty"),
        (nn.Linear(3, 3), torch.zeros(1, 4), r"export_c\(Linear\): the model does not run"),
        ("missing.safetensors", torch.zeros(1, 4), "missing.safetensors"),
        (3, torch.zeros(1, 4), r"export_c\(int\): takes a torch.nn.Module or the path"),
    ],
)
def test_what_cannot_be_exported(tmp_path, model, example, message):
    with pytest.raises(InputError, match=message):
        probmask.runtime.export_c(model, tmp_path / "out", example)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten_without_being_asked(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="the directory is not empty"):
        probmask.runtime.export_c(nn.Linear(2, 2), tmp_path, torch.zeros(1, 2))
    with pytest.raises(InputError, match="is a file"):
        probmask.runtime.export_c(nn.Linear(2, 2), tmp_path / "notes.txt", torch.zeros(1, 2))
    done = probmask.runtime.export_c(nn.Linear(2, 2), tmp_path, torch.zeros(1, 2), overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert done.bytes == sum(f.stat().st_size for f in tmp_path.iterdir() if f.suffix != ".txt")


@pytest.fixture
def artifact(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    metadata = {"model": "smallconv", "model_args": {"width": 8}, "image_shape": [1, 8, 8]}
    model = masked(models.smallconv(width=8), 0.9)
    probmask.save(model, path, metadata=metadata, values="int4")  # exports need its rounded weights
    return path


def test_the_command_writes_a_program_that_its_makefile_builds(artifact, tmp_path, capsys):
    TOOLCHAINS["gcc"].skip_if_missing()
    if shutil.which("make") is None:
        pytest.skip("make not installed")
    out = tmp_path / "out"
    assert main(["export", str(artifact), str(out), "--format", "c", "--batch", "3"]) == 0
    assert "cc -std=c99" in capsys.readouterr().out
    subprocess.run(["make", "-s", "CC=gcc -O0"], cwd=out, check=True, env=os.environ)
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        expected = probmask.load(artifact)(x)
    for result in run(["./network"], out, [x], expected):
        assert_close(result, expected)
    cut = subprocess.run(["./network"], cwd=out, input=b"0123", capture_output=True, check=False)
    assert (cut.returncode, cut.stdout) == (1, b"")
    assert b"expected 192 numbers, found 1" in cut.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out", "--format", "c++"], "format"),
        (["out.onnx", "--batch", "2"], "--batch 2: only --format c has a fixed batch size"),
        (["out", "--format", "c", "--batch", "0"], "at least 1"),
        (["out", "--format", "c", "--batch", "99999999999"], "exceeds the limit"),
        (["out", "--format", "c", "--input-shape", "2,8,8"], "export_c(SmallConv)"),
        ([".", "--format", "c"], "the directory is not empty"),
        (["model.safetensors", "--format", "c"], "is a file"),
    ],
)
def test_errors_of_the_command(artifact, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    before = artifact.read_bytes()
    assert main(["export", "model.safetensors", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert artifact.read_bytes() == before
    assert not (tmp_path / "out").exists()
