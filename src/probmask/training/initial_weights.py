"""The weights of a pretrained start (``init``), read from a file without executing its content."""

import hashlib
import pickle
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from probmask.artifact import load_state
from probmask.data.releases import expand_home
from probmask.errors import InputError
from probmask.masking.sites import matches
from probmask.messages import one_line, printable
from probmask.storage.format import FORMAT_KEY
from probmask.training.sharded_state import divided_like

_FILE = "model.safetensors"  # in a run's directory, and in one of Hugging Face
# Keys under which training scripts store the state_dict.
_NESTED = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")  # of DDP and torch.compile
_CHUNK = 2**20
_SHOWN = 3  # names of a kind in a message
# Old files lack the batch counters of BatchNorm.
_COUNTER = "num_batches_tracked"
# Old files of Hugging Face have the numbers 0, 1, 2, … under this name.
_POSITIONS = "position_ids"


def locate_initial_weights(given: str) -> Path:
    """Return the file; of a directory, the model.safetensors in it.

    Raises:
        InputError: The file does not exist.
    """
    path = expand_home(given)
    path = path / _FILE if path.is_dir() else path
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise InputError(f"--init {path}: cannot be read: {error.strerror}.") from error
    if not is_file:
        raise InputError(f"--init {path}: is not a regular file.")
    return path


def digest_of(given: str) -> str:
    """Return the SHA-256 of the file."""
    path, digest = locate_initial_weights(given), hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise InputError(f"--init {path}: cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def check_digest(given: str, sha256: str | None) -> None:
    """Raise InputError if the file does not exist, or is not the one with this SHA-256."""
    path, found = locate_initial_weights(given), digest_of(given)
    if sha256 not in (None, found):
        raise InputError(
            f"--init {path}: its SHA-256 is {found[:12]}…, but init_sha256 is {sha256:.12}…; "
            "restore the file, or omit init_sha256 to start from this one."
        )


def load_initial_weights(
    model: nn.Module,
    given: str,
    *,
    skip: Sequence[str] = (),
    sha256: str | None = None,
    own_name: Callable[[str], str] | None = None,
) -> None:
    """Load a file into a model: all of its tensors or, on an error, none.

    Args:
        model: The model.
        given: A safetensors file, an artifact, a ``state_dict`` that `torch.save` wrote, or the
            directory of a run or of Hugging Face with a model.safetensors.
        skip: Patterns of names that are left as they are in the model, such as ``"fc.*"``.
        sha256: Digest that the file must have, or None.
        own_name: Function that returns the model's name of a tensor in the files of another
            package, or None.

    Raises:
        InputError: The file is another one, cannot be read without executing code, or does not
            fit the model.
    """
    path = locate_initial_weights(given)
    check_digest(given, sha256)
    own = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    state = _for_model(_read(path), own, own_name)
    for pattern in skip:
        if not any(matches(name, [pattern]) for name in [*own, *state]):
            raise InputError(
                f"train(init_skip={list(skip)}): {pattern!r} matches no weight of the network or "
                "of the file."
            )
    wanted = {name: tensor for name, tensor in own.items() if not matches(name, skip)}
    offered = {name: tensor for name, tensor in state.items() if not matches(name, skip)}
    _check_fits(path, wanted, offered)
    model.load_state_dict(divided_like(offered, own), strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        start = file.read(9)
    size = path.stat().st_size
    if len(start) == 9 and start[8:] == b"{" and int.from_bytes(start[:8], "little") < size:
        return _read_safetensors(path)
    if start[:2] in (b"PK", b"\x80\x02"):
        return _read_torch(path)
    raise InputError(
        f"--init {path}: is neither a safetensors file, nor an artifact of probmask, nor a "
        "state_dict saved by torch.save."
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            if FORMAT_KEY not in (file.metadata() or {}):
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise _damaged(path, one_line(error).rstrip(".")) from error
    return load_state(path)


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Read a state_dict with PyTorch's restricted unpickler, which calls no foreign code."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # torch.save does not compress; a compressed file could unpack to any size.
                if any(member.compress_type for member in archive.infolist()):
                    raise InputError(
                        f"--init {path}: is compressed, so torch.save did not write it."
                    )
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"--init {path}: contains more than tensors, and loading it could execute code; save "
            "model.state_dict() instead of the model."
        ) from error
    except InputError:
        raise
    except Exception as error:  # a damaged file raises errors of many types
        raise _damaged(path, "PyTorch cannot read it") from error
    return _plain_tensors(path, _unnested(content))


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        f"--init {path}: is damaged or incomplete ({reason}); copy or download it again."
    )


def _unnested(content: Any) -> Any:
    for key in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            return content[key]
    return content


def _plain_tensors(path: Path, state: Any) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or not state:
        raise InputError(f"--init {path}: contains no state_dict; save model.state_dict().")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(
                f"--init {path}: {printable(str(name))[:60]!r} is not a tensor; save "
                f"model.state_dict(), by itself or under one of the keys {', '.join(_NESTED)}."
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise InputError(f"--init {path}: {name} is not a plain dense tensor.")
    return dict(state)


def _without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            return _without_wrappers({name[len(prefix) :]: t for name, t in state.items()})
    return dict(state)


def _for_model(
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    own_name: Callable[[str], str] | None,
) -> dict[str, Tensor]:
    """Return the tensors of a file with the names and shapes that the model has for them."""
    state = _without_wrappers(state)
    state = {name: t for name, t in state.items() if name.rpartition(".")[2] != _POSITIONS}
    if not state.keys() & own.keys():
        if own_name is not None:
            state = {own_name(name): tensor for name, tensor in state.items()}
        state = _with_prefix(state, own)
    return {name: _as_convolution(tensor, own.get(name)) for name, tensor in state.items()}


def _with_prefix(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add or remove the name of a module if no name of the file is one of the model without it.

    A file of transformers' `BertModel` is loaded into the module ``bert`` of a classifier, and a
    file whose names all begin with ``model.`` into a network without that module.
    """
    if state.keys() & own.keys():
        return state
    for prefix in dict.fromkeys(name.partition(".")[0] for name in own):
        added = {f"{prefix}.{name}": tensor for name, tensor in state.items()}
        if added.keys() & own.keys():
            return added
    prefixes = {name.partition(".")[0] for name in state}
    removed = {name.partition(".")[2]: tensor for name, tensor in state.items()}
    return removed if len(prefixes) == 1 and removed.keys() & own.keys() else state


def _as_convolution(tensor: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the weight of a linear layer as that of a 1×1 convolution, if the model has one."""
    is_convolution = wanted is not None and wanted.shape == (*tensor.shape, 1, 1)
    return tensor[..., None, None] if is_convolution and tensor.dim() == 2 else tensor


def _check_fits(path: Path, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    given = {id(own[name]) for name in state if name in own}
    missing = [  # a tied weight needs one of its names only
        name
        for name, tensor in own.items()
        if id(tensor) not in given and not name.endswith(_COUNTER)
    ]
    unexpected = [name for name in state if name not in own]
    differing = [
        f"{name}: {list(state[name].shape)} in the file, {list(own[name].shape)} in the network"
        for name in state
        if name in own and state[name].shape != own[name].shape
    ]
    problems = [
        f"{len(names)} {what} ({printable('; '.join(each[:120] for each in names[:_SHOWN]))}"
        f"{'; …' if len(names) > _SHOWN else ''})"
        for what, names in (
            ("missing in the file", missing),
            ("not in the network", unexpected),
            ("of another shape", differing),
        )
        if names
    ]
    if problems:
        raise InputError(
            f"--init {path}: does not fit the network. Tensors: {', '.join(problems)}. Use the "
            "network that was saved; to leave some of its weights random, name them in init_skip, "
            "as in --set 'init_skip=[\"fc.*\"]'."
        )
    for name, tensor in state.items():
        if tensor.is_floating_point() != own[name].is_floating_point() or tensor.is_complex():
            raise InputError(f"--init {path}: {name} has the type {tensor.dtype}.")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise InputError(f"--init {path}: {name} contains values that are not finite.")
