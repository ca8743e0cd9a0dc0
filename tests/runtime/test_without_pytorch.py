"""`probmask.save(graph=True)` and `probmask.runtime.load`, also where PyTorch is not installed."""

import importlib.util
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import probmask
from probmask import runtime
from probmask.artifact import load_state
from probmask.cli import main
from probmask.errors import ArtifactError, InputError, NonFiniteError
from runtime.rearranging import REARRANGING

NEEDED = ("numpy", "numba", "llvmlite", "safetensors", "probmask")

SCRIPT = """
import sys
import numpy as np

try:
    import torch
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("PyTorch is installed here")
import probmask

engine = probmask.runtime.load(sys.argv[1], threads=2)
given = np.load(sys.argv[2])
inputs = [given[f"input{i}"] for i in range(len(given) - 1)]
for batch in (1, 2, len(inputs[0])):
    found = engine(*(array[:batch] for array in inputs))
    np.testing.assert_allclose(found, given["output"][:batch], rtol=1e-3, atol=1e-4)
engine.explain()
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment that has NumPy, Numba and safetensors, but no PyTorch."""
    folder = tmp_path_factory.mktemp("without_pytorch")
    venv.create(folder / "venv", with_pip=False)
    packages = folder / "packages"
    packages.mkdir()
    for name in NEEDED:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.submodule_search_locations is not None
        source = Path(found.submodule_search_locations[0])
        (packages / name).symlink_to(source)
        libraries = source.with_name(f"{name}.libs")  # shared libraries of wheels
        if libraries.is_dir():
            (packages / libraries.name).symlink_to(libraries)
    site = next((folder / "venv").glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python"


def sparse(model):
    """Return the model in evaluation mode with few weights and BatchNorms of any statistics."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.masked_fill_(torch.rand_like(parameter) < 0.8, 0.0)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return model.eval()


def tokens(sentences, length=7):
    """Return sentences and their mask; some end in padding, one is all padding."""
    ids = torch.randint(0, 50, (sentences, length), generator=torch.Generator().manual_seed(1))
    attended = torch.ones_like(ids)
    attended[1::2, 4:] = 0
    attended[3:4] = 0
    return ids, attended


class Sentences(nn.Module):
    """Embeddings, attention with a padding mask, and a view as the output."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(50, 16), nn.Embedding(9, 16)
        self.inputs, self.outputs = nn.Linear(16, 48), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids, attended):
        x = self.embedding(ids) + self.position.weight[: ids.shape[1]]
        heads = self.inputs(x).unflatten(2, (3, 4, 4)).transpose(1, 3).unbind(2)
        mask = attended.bool()[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = self.norm(x + self.outputs(mixed.transpose(1, 2).flatten(2)))
        return x.transpose(1, 2)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Recurrent(nn.Module):
    """Two layers of an LSTM in both directions, and a GRU."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(6, 10, num_layers=2, bidirectional=True, batch_first=True)
        self.more, self.classifier = nn.GRU(20, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.classifier(self.more(self.cells(x)[0])[0])


class Enlarging(nn.Module):
    """A U-Net of one level with transposed convolutions, a copied slice and a padded shortcut."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up, self.norm = nn.ConvTranspose2d(12, 8, 3, 2, 1, 1, groups=2), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        shortcut = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))  # option A
        y = (self.down(x) + shortcut).relu()
        y = self.norm(self.up(y)).relu()
        return self.last(torch.cat([x, y], 1))


class Volumes(nn.Module):
    """Convolutions, BatchNorm and pooling of volumes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(2, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU())
        self.second = nn.Conv3d(6, 6, (3, 3, 2), stride=(1, 2, 2), padding=1, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = nn.functional.max_pool3d(self.first(x), 2, ceil_mode=True)
        x = nn.functional.avg_pool3d(self.second(x[:, :, 1:]), (2, 1, 1))
        return self.head(x.mean((2, 3, 4)))


NETWORKS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5)),
        lambda n: (torch.randn(n, 20),),
    ),
    "resnet": (lambda: probmask.models.resnet14(width=4), lambda n: (torch.randn(n, 3, 32, 32),)),
    "encoder": (encoder, lambda n: (torch.randn(n, 9, 16),)),
    "sentences": (Sentences, tokens),
    "bert": (lambda: probmask.models.bert(vocabulary=50, width=24, layers=2, heads=2), tokens),
    "lstm": (Recurrent, lambda n: (torch.randn(n, 7, 6),)),
    "enlarging": (Enlarging, lambda n: (torch.randn(n, 3, 12, 10),)),
    "volumes": (Volumes, lambda n: (torch.randn(n, 2, 5, 9, 8),)),
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def arrays(tensors):
    return [tensor.numpy() for tensor in tensors]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_runs_where_pytorch_is_not_installed(python, path, name):
    build, inputs_of = NETWORKS[name]
    model, inputs = sparse(build()), inputs_of(19)
    probmask.save(model, path, graph=True, example=inputs_of(2))
    with torch.no_grad():
        expected = model(*inputs).numpy()
    named = {f"input{i}": array for i, array in enumerate(arrays(inputs))}
    np.savez(path.with_suffix(".npz"), output=expected, **named)
    command = [python, "-c", SCRIPT, path, path.with_suffix(".npz")]
    done = subprocess.run(command, capture_output=True, text=True, env={}, cwd=path.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "per call; 2 threads" in done.stdout


class FinalStates(nn.Module):
    """A GRU with its final states, whose batch is the second dimension."""

    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(6, 10, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cells(x)


MORE_NETWORKS = NETWORKS | {
    "final states": (FinalStates, lambda n: (torch.randn(n, 7, 6),)),
    "interpolation": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")),
        lambda n: (torch.randn(n, 3, 6, 7),),
    ),
    **{
        name: (build, lambda n, shape=shape: (torch.randn(n, *shape),))
        for name, (build, shape) in REARRANGING.items()
    },
}


@pytest.mark.parametrize("name", MORE_NETWORKS)
def test_it_computes_what_the_engine_with_pytorch_computes(path, name):
    build, inputs_of = MORE_NETWORKS[name]
    model, inputs = sparse(build()), inputs_of(5)
    probmask.save(model, path, graph=True, example=inputs_of(1))
    engine = runtime.compile(model, inputs_of(1), layers="sparse", threads=1)
    found, expected = runtime.load(path, threads=1)(*arrays(inputs)), engine(*inputs)
    single = isinstance(expected, torch.Tensor)
    for ours, theirs in [(found, expected)] if single else zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs.numpy())


class Derived(nn.Module):
    """Constants that are computed from weights: of a BatchNorm, tied layers, and products."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.position = nn.Parameter(torch.randn(1, 16, 8))
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.third.weight = self.second.weight

    def forward(self, x):
        x = self.stem(x) * self.scale
        x = x.flatten(2).transpose(1, 2) + 1.5 * self.position
        x = nn.functional.linear(x, 1.1 * self.first.weight, self.first.bias / 3)
        return self.third(self.second(x.relu()).relu())


AS_ARTIFACTS = {
    **{name: NETWORKS[name] for name in ("resnet", "sentences", "enlarging")},
    "derived": (Derived, lambda n: (torch.randn(n, 3, 6, 6),)),
}


@pytest.mark.parametrize("values", [None, "fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("name", AS_ARTIFACTS)
def test_the_graph_has_the_weights_of_the_artifact(path, name, values):
    """All that is computed from weights is computed from those in the file, rounded or not."""
    build, inputs_of = AS_ARTIFACTS[name]
    model, inputs = sparse(build()), inputs_of(3)
    plain = probmask.save(model, path, values=values)
    info = probmask.save(
        model, path, values=values, graph=True, example=inputs, metadata={"a": 1}, overwrite=True
    )
    assert (plain.has_graph, info.has_graph, info.format) == (False, True, 3)
    assert info.metadata == {"a": 1}
    if name == "resnet":
        assert info.file_bytes < plain.file_bytes + 2500
    loaded = probmask.load_into(build(), path).eval()
    with torch.no_grad():
        expected = loaded(*inputs).numpy()
    found = runtime.load(path)(*arrays(inputs))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("values", ["fp16", "int4"])
def test_the_command_stores_the_values_of_the_artifact(path, capsys, values):
    described = {"model": "smallconv", "model_args": {"width": 8}, "image_shape": [1, 8, 8]}
    probmask.save(
        sparse(probmask.models.smallconv(width=8)), path, metadata=described, values=values
    )
    with_graph = path.with_name("graph.safetensors")
    assert main(["export", str(path), str(with_graph), "--format", "graph"]) == 0
    stored, before = load_state(with_graph), load_state(path)
    assert all(torch.equal(stored[name], tensor) for name, tensor in before.items())
    x = torch.randn(3, 1, 8, 8)
    expected = probmask.load(path)(x).detach().numpy()
    np.testing.assert_allclose(runtime.load(with_graph)(x.numpy()), expected, atol=1e-5)


def test_outputs_keep_their_structure(path):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 6)

        def forward(self, x):
            y = self.layer(x)
            return {"both": (y, y), "part": [y[:, 2:4], None, 3]}

    model, x = Several().eval(), torch.randn(3, 4)
    probmask.save(model, path, graph=True, example=x)
    found, expected = runtime.load(path)(x.numpy()), model(x)
    assert found["part"][1:] == [None, 3]
    first, second = found["both"]
    assert isinstance(found["both"], tuple)
    assert first is not second
    for a, b in ((first, expected["both"][0]), (found["part"][0], expected["part"][0])):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=1e-6)


def test_equal_models_give_equal_bytes(path):
    build, inputs_of = NETWORKS["encoder"]
    model = sparse(build())
    for name, batch in (("a", 2), ("b", 3)):
        probmask.save(model, path.with_name(name), graph=True, example=inputs_of(batch))
    assert path.with_name("a").read_bytes() == path.with_name("b").read_bytes()


def test_an_operation_without_a_kernel_is_named(path):
    class Sorted(nn.Module):
        def forward(self, x):
            return nn.functional.linear(x.sort(dim=1).values, torch.eye(4))

    with pytest.raises(InputError, match=r"save\(graph=True\): .* cannot run: .*sort"):
        probmask.save(Sorted(), path, graph=True, example=torch.randn(2, 4))
    assert not path.exists()


def test_arguments_that_do_not_fit_raise(path):
    model, x = nn.Linear(4, 2), torch.zeros(1, 4)
    with pytest.raises(InputError, match=r"save\(graph=True\): pass example="):
        probmask.save(model, path, graph=True)
    with pytest.raises(InputError, match=r"save\(example=\.\.\.\): .* pass graph=True too"):
        probmask.save(model, path, example=x)
    probmask.save(model, path)
    with pytest.raises(ArtifactError, match="the file has no graph; save the network with"):
        runtime.load(path)
    probmask.save(model, path, graph=True, example=x, overwrite=True)
    with pytest.raises(InputError, match="threads"):
        runtime.load(path, threads=0)
    engine = runtime.load(path)
    for wrong in (np.zeros((2, 5), "f4"), np.zeros((2, 4)), np.zeros(4, "f4"), [[0.0] * 4]):
        with pytest.raises(InputError, match="the network takes input as an array of N×4 float32"):
            engine(wrong)
        assert not engine.takes(wrong)
    with pytest.raises(InputError, match="takes 1 input, not 2"):
        engine(x.numpy(), x.numpy())
    with pytest.raises(NonFiniteError, match="not finite"):
        engine(np.full((1, 4), np.inf, np.float32))


def test_integers_outside_of_a_table_raise(path):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
    probmask.save(model, path, graph=True, example=torch.zeros(1, 5, dtype=torch.int64))
    engine = runtime.load(path)
    with pytest.raises(InputError, match="takes integers from 0 to 8"):
        engine(np.array([[0, 1, 2, 3, 9]]))
    with pytest.raises(InputError, match="has numbers from -1 to 3"):
        engine(np.array([[0, 1, 2, 3, -1]]))
