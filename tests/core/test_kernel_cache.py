"""Kernels are compiled whatever the state of Numba's cache."""

import importlib.util
import pickle
import threading
import warnings
from pathlib import Path

import pytest

numba = pytest.importorskip("numba")

from probmask.core import kernel_cache  # noqa: E402
from probmask.errors import KernelCacheWarning  # noqa: E402


@pytest.fixture
def function(tmp_path, monkeypatch):
    """A function in a file of its own, whose kernels are cached in ``tmp_path / "cache"``."""
    monkeypatch.setattr(kernel_cache, "_warned", threading.Event())
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source" / "small.py"
    source.parent.mkdir()
    source.write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("small", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.double


def call(function):
    """Call the kernel as a new process would; return how often it was found in the cache."""
    kernel = kernel_cache.cached_njit(nogil=True)(function)
    assert kernel(21) == 42
    return sum(kernel.stats.cache_hits.values())


def only(tmp_path, suffix):
    (path,) = (tmp_path / "cache").rglob(f"*.{suffix}")
    return path


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap_for_directory(path):
    path.unlink()
    path.mkdir()


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def overwrite(path):
    path.write_bytes(b"\x00garbage" * 50)


def store_numbers(path):
    """Replace the names of the entries with numbers."""
    with path.open("rb") as file:
        version, (stamp, names) = pickle.load(file), pickle.load(file)
    with path.open("wb") as file:
        pickle.dump(version, file)
        pickle.dump((stamp, dict.fromkeys(names, 7)), file)


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        ("nbi", overwrite),
        ("nbi", halve),
        ("nbi", empty),
        ("nbi", store_numbers),
        ("nbc", overwrite),
        ("nbc", halve),
        ("nbc", flip_a_bit),
    ],
)
def test_damaged_files_are_replaced(function, tmp_path, suffix, damage):
    assert (call(function), call(function)) == (0, 1)
    path = only(tmp_path, suffix)
    damage(path)
    with pytest.warns(KernelCacheWarning, match="cannot be used") as warned:
        assert call(function) == 0
    assert [str(path.parent) in str(warning.message) for warning in warned] == [True]
    assert call(function) == 1


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_files_that_cannot_be_read_or_replaced_are_left(function, tmp_path, suffix):
    call(function)
    swap_for_directory(only(tmp_path, suffix))
    with pytest.warns(UserWarning, match="The kernel cache in .* cannot be used"):
        assert call(function) == 0
    assert call(function) == 0  # without a second warning


def test_an_entry_of_another_kernel_is_not_used(function, tmp_path):
    """Two processes that write at the same time can leave an index that names the other's entry."""
    call(function)
    path = only(tmp_path, "nbc")
    kernel = kernel_cache.cached_njit(nogil=True)(function)
    assert kernel(1.5) == 3.0
    (other,) = set(path.parent.glob("*.nbc")) - {path}
    path.write_bytes(other.read_bytes())
    assert call(function) == 0
    assert call(function) == 1


def test_a_full_disk_is_reported_once(function, tmp_path):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert (call(function), call(function)) == (0, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (message,) = (str(warning.message) for warning in warned)
    assert "File too large" in message
    assert str(tmp_path / "cache") in message
    assert (call(function), call(function)) == (0, 1)


def test_a_file_in_place_of_the_directory(function, tmp_path, monkeypatch):
    chosen = tmp_path / "cache"
    chosen.touch()
    beside = Path(function.__code__.co_filename).parent / "__pycache__"
    with pytest.warns(
        UserWarning, match=f"NUMBA_CACHE_DIR={chosen}: cannot be written. .* {beside}"
    ):
        assert call(function) == 0
    assert call(function) == 1
    for path in sorted(beside.iterdir()):
        path.unlink()
    beside.rmdir()
    beside.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(chosen))
    kernel_cache._warned.clear()
    with pytest.warns(UserWarning, match=f"The kernel cache in {chosen} cannot be used"):
        assert call(function) == 0
    assert call(function) == 0
