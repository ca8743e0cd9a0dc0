"""Saving and loading models: names, tied weights, metadata, errors."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from probmask import artifact, freeze_masks
from probmask.errors import ArtifactError, InputError


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Embedding(30, 20)
        self.norm = nn.BatchNorm1d(20)
        self.decoder = nn.Linear(20, 30)
        if tied:
            self.decoder.weight = self.encoder.weight


def sparse_model(seed: int = 0, *, tied: bool = True) -> Tied:
    torch.manual_seed(seed)
    model = Tied(tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.masked_fill_(torch.rand_like(parameter) < 0.9, 0.0)
    return model


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_equal_models_and_metadata_give_equal_bytes(tmp_path):
    artifact.save(sparse_model(), tmp_path / "a", metadata={"b": {"z": 1, "y": 2}, "a": [1.5]})
    artifact.save(sparse_model(), tmp_path / "b", metadata={"a": [1.5], "b": {"y": 2, "z": 1}})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tied_weights_are_stored_once_and_come_back_tied(path):
    model = sparse_model()
    artifact.save(model, path)
    info = artifact.read(path)
    assert info.aliases == {"decoder.weight": "encoder.weight"}
    state = artifact.load_state(path)
    assert state.keys() == model.state_dict().keys()
    assert state["decoder.weight"] is state["encoder.weight"]
    other = artifact.load_into(sparse_model(1), path)
    assert other.decoder.weight is other.encoder.weight
    assert_same(other, model)


def test_an_untied_model_loads_a_tied_file_but_not_the_reverse(tmp_path):
    artifact.save(sparse_model(), tmp_path / "tied")
    artifact.save(sparse_model(tied=False), tmp_path / "untied")
    assert_same(artifact.load_into(Tied(tied=False), tmp_path / "tied"), sparse_model())
    with pytest.raises(
        ArtifactError, match=r"encoder.weight and decoder.weight are tied in the model"
    ):
        artifact.load_into(Tied(), tmp_path / "untied")


def test_read_returns_the_table_and_the_sizes(path):
    model = sparse_model()
    artifact.save(model, path, metadata={"method": "ProbMask", "sparsity": 0.9})
    info = artifact.read(path)
    assert (info.format, info.metadata["sparsity"]) == (1, 0.9)
    assert info.created_by.startswith("probmask ")
    rows = {row.name: row for row in info.tensors}
    assert list(rows) == [name for name in model.state_dict() if name != "decoder.weight"]
    row = rows["encoder.weight"]
    assert (row.shape, row.dtype, row.encoding) == ((30, 20), "F32", "rice")
    assert row.nnz == int(model.encoder.weight.count_nonzero())
    assert row.stored_bytes < 6 * row.nnz
    assert rows["norm.num_batches_tracked"].dtype == "I64"
    assert info.file_bytes == path.stat().st_size
    distinct = set(model.parameters()) | set(model.buffers())
    assert info.dense_bytes == sum(tensor.nbytes for tensor in distinct)


def test_an_existing_file_raises_unless_overwrite(path):
    artifact.save(sparse_model(0), path)
    with pytest.raises(InputError, match="exists; pass overwrite=True"):
        artifact.save(sparse_model(1), path)
    artifact.save(sparse_model(1), path, overwrite=True)
    assert_same(artifact.load_into(Tied(), path), sparse_model(1))


def test_a_loaded_model_outlives_its_file(path):
    artifact.save(sparse_model(), path)
    state = artifact.load_state(path)
    artifact.save(sparse_model(1), path, overwrite=True)
    path.unlink()
    for name, tensor in sparse_model().state_dict().items():
        assert torch.equal(state[name], tensor)
    for tensor in state.values():
        tensor.zero_()  # the mapping is private


@pytest.mark.parametrize(
    "metadata",
    [{"a": float("nan")}, {"a": object()}, {1: "a"}, {"a": [{2: 3}]}, [1], {"a": torch.ones(1)}],
)
def test_metadata_that_is_not_json_raises(path, metadata):
    with pytest.raises(InputError, match=r"save\(metadata=...\): not plain JSON"):
        artifact.save(nn.Linear(1, 1), path, metadata=metadata)
    assert not path.exists()


@pytest.mark.parametrize("values", [None, "fp16"])
def test_negative_zeros_are_zeros(path, values):
    """Pruning by multiplication, as torch.nn.utils.prune does, leaves -0.0."""
    model = nn.Linear(100, 100)
    prune.l1_unstructured(model, "weight", 0.95)
    prune.remove(model, "weight")
    assert model.weight.signbit().sum() > 4000
    artifact.save(model, path, values=values)
    summary = artifact.inspect(path)
    assert (summary.kept, summary.sparsity) == (500, 0.95)
    loaded = artifact.load_state(path)["weight"]
    assert loaded.count_nonzero() == 500
    assert not loaded[loaded == 0].signbit().any()
    with torch.no_grad():
        model.weight.add_(0.0)
    artifact.save(model, path.with_name("positive"), values=values)
    assert path.read_bytes() == path.with_name("positive").read_bytes()


def test_the_suffix_of_another_format_warns_and_the_file_is_written(tmp_path):
    model = sparse_model()
    message = r"model\.pt'\): this is a safetensors file, .* name it model\.safetensors"
    with pytest.warns(UserWarning, match=message) as caught:
        artifact.save(model, tmp_path / "model.pt")
    assert caught[0].filename == __file__
    assert_same(artifact.load_into(sparse_model(1), tmp_path / "model.pt"), model)


def test_a_model_with_masks_raises(path):
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 2, 1))
    with torch.no_grad():
        model.conv1.weight[0] = 0.0
    masks = freeze_masks(model)
    reason = r"save\(model\): conv1.weight still has a mask; call finalize\(\)"
    with pytest.raises(InputError, match=reason):
        artifact.save(model, path)
    masks.finalize()
    artifact.save(model, path)


def test_a_model_that_torch_still_prunes_raises(path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Conv2d(1, 2, 1)))
    prune.l1_unstructured(model[0], "bias", 0.5)
    for _ in range(2):  # repeated pruning makes a container of the two
        prune.random_unstructured(model[1][0], "weight", 0.5)
    message = (
        r"save\(model\): torch\.nn\.utils\.prune still masks 0\.bias \(and 1 more\); .*"
        r"torch\.nn\.utils\.prune\.remove\(module, 'bias'\)"
    )
    with pytest.raises(InputError, match=message):
        artifact.save(model, path)
    prune.remove(model[0], "bias")
    with pytest.raises(InputError, match=r"still masks 1\.0\.weight; "):
        artifact.save(model, path)
    prune.remove(model[1][0], "weight")
    assert [tensor.name for tensor in artifact.save(model, path).tensors] == list(
        model.state_dict()
    )


def test_other_parametrizations_are_part_of_the_model(path):
    artifact.save(weight_norm(nn.Linear(3, 2)), path)
    artifact.load_into(weight_norm(nn.Linear(3, 2)), path)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"step": 3}


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (WithExtraState(1, 1), "_extra_state is a dict, not a tensor"),
        (nn.LazyLinear(2), "weight is a UninitializedParameter without data"),
        (nn.Linear(2, 2, device="meta"), "weight is a Parameter without data|is a Tensor without"),
        (nn.Linear(2, 2, dtype=torch.complex128), "weight is a torch.complex128 tensor"),
    ],
)
def test_what_the_format_cannot_store_raises(path, model, what):
    with pytest.raises(InputError, match=what):
        artifact.save(model, path)


@pytest.mark.parametrize("name", ["__metadata__", "probmask:F32", "probmask:table"])
def test_reserved_names_raise(path, name):
    model = nn.Module()
    model.register_buffer(name, torch.zeros(3))
    with pytest.raises(InputError, match=f"reserves the name {name}; rename it"):
        artifact.save(model, path)


@pytest.mark.parametrize("size", [900, 90_000])
def test_names_that_look_like_parts_are_stored_correctly(path, size):
    holder = nn.Module()
    holder.w = nn.Module()
    holder.w.register_buffer("values", torch.arange(size) + 1.0)
    holder.register_state_dict_post_hook(
        lambda _m, state, _p, _l: state.update(w=torch.zeros(size))
    )
    artifact.save(holder, path)
    assert torch.equal(artifact.load_state(path)["w"], torch.zeros(size))
    assert torch.equal(artifact.load_state(path)["w.values"], torch.arange(size) + 1.0)


def test_a_mismatch_names_the_first_tensors_and_leaves_the_model_unchanged(path):
    artifact.save(sparse_model(), path)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ArtifactError) as caught:
        artifact.load_into(model, path)
    assert "4 (0.bias, 0.weight, 1.bias, ...) missing in the file" in str(caught.value)
    assert "(decoder.bias, decoder.weight, encoder.weight, ...) missing in the model" in str(
        caught.value
    )

    larger = Tied()
    larger.norm = nn.BatchNorm1d(21)
    before = {name: tensor.clone() for name, tensor in larger.state_dict().items()}
    reason = r"norm.weight is \[20\] in the file and \[21\] in the model \(in total 4 \(norm.weight"
    for strict in (True, False):
        with pytest.raises(ArtifactError, match=reason):
            artifact.load_into(larger, path, strict=strict)
    for name, tensor in larger.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_without_strict_only_common_names_are_loaded(path):
    artifact.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), path)
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2))
    kept = model[2].weight.clone()
    assert artifact.load_into(model, path, strict=False) is model
    assert torch.equal(model[0].weight, artifact.load_state(path)["0.weight"])
    assert torch.equal(model[2].weight, kept)


def test_a_model_on_the_meta_device_gets_the_tensors_without_a_copy(path):
    model = sparse_model()
    model.encoder.weight.requires_grad_(False)
    artifact.save(model, path)
    with torch.device("meta"):
        empty = Tied()
    empty.encoder.weight.requires_grad_(False)
    loaded = artifact.load_into(empty, path)
    assert loaded.decoder.weight is loaded.encoder.weight
    assert_same(loaded, model)
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert (type(b), b.requires_grad, b.device.type) == (
            nn.Parameter,
            a.requires_grad,
            "cpu",
        ), name


def test_an_untied_model_on_the_meta_device_stays_untied(path):
    artifact.save(sparse_model(), path)
    with torch.device("meta"):
        empty = Tied(tied=False)
    loaded = artifact.load_into(empty, path)
    assert loaded.decoder.weight is not loaded.encoder.weight
    with torch.no_grad():
        loaded.decoder.weight.zero_()
    assert torch.equal(loaded.encoder.weight, sparse_model().encoder.weight)


def test_a_model_on_the_meta_device_that_the_file_cannot_complete_raises(path):
    artifact.save(nn.Linear(2, 2), path)
    model = nn.Linear(2, 2, device="meta")
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    with pytest.raises(InputError, match=r"1 \(table\) are on the meta device and not in the file"):
        artifact.load_into(model, path)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_loaded_model_can_be_copied_pickled_and_trained(path, copied, device):
    model = nn.Sequential(nn.Linear(60, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    artifact.save(model, path)
    with torch.device(device):
        empty = nn.Sequential(nn.Linear(60, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    twin = copied(artifact.load_into(empty, path))
    path.unlink()
    assert_same(twin, model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(torch.randn(4, 60)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(twin[0].weight, model[0].weight)


def test_values_are_converted_to_the_dtype_of_the_model(path):
    artifact.save(nn.Linear(4, 4).half(), path)
    model = artifact.load_into(nn.Linear(4, 4), path)
    assert torch.equal(model.weight, artifact.load_state(path)["weight"].float())


def test_a_conjugate_view_is_stored_conjugated(path):
    model = nn.Module()
    model.register_buffer("c", torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj())
    artifact.save(model, path)
    assert artifact.load_state(path)["c"].tolist() == [1 - 2j, 3 + 4j]


def test_a_name_that_is_not_unicode_raises(path):
    model = nn.Module()
    model.register_buffer("\ud800", torch.ones(5000))
    with pytest.raises(InputError, match=r"the name '\\ud800' is not valid Unicode"):
        artifact.save(model, path)
    assert not path.exists()


def test_a_state_dict_raises(path):
    with pytest.raises(InputError, match="of type OrderedDict; pass the network"):
        artifact.save(nn.Linear(2, 2).state_dict(), path)


def test_a_sparse_layout_raises(path):
    model = nn.Module()
    model.register_buffer("s", torch.eye(3).to_sparse())
    with pytest.raises(InputError, match=r"s is a torch.float32 tensor of layout torch.sparse_coo"):
        artifact.save(model, path)
