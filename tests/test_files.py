"""Atomic writes: after any failure the file has the old content or the new content."""

import errno
import os
from pathlib import Path

import pytest

from probmask.errors import InputError
from probmask.files import writable_target, write_atomically


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    "data",
    [
        b"new content",
        [b"new ", memoryview(b"content")],
        (part for part in [b"new", b" content"]),
        lambda file: file.write(b"new content"),
    ],
)
def test_data_is_bytes_chunks_or_a_function(tmp_path, data):
    write_atomically(tmp_path / "file", data, overwrite=False)
    assert contents(tmp_path) == {"file": b"new content"}


def test_a_path_may_be_text(tmp_path):
    write_atomically(str(tmp_path / "file"), b"", overwrite=False)
    assert contents(tmp_path) == {"file": b""}


def test_overwrite_replaces_the_old_file(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    write_atomically(tmp_path / "file", b"new", overwrite=True)
    assert contents(tmp_path) == {"file": b"new"}


def test_an_existing_file_raises_before_anything_is_written(tmp_path):
    (tmp_path / "file").write_bytes(b"old")

    def never(file):
        raise AssertionError("must not be called")

    with pytest.raises(InputError, match=r"file: the file exists; pass overwrite=True"):
        write_atomically(tmp_path / "file", never, overwrite=False)
    assert contents(tmp_path) == {"file": b"old"}


def full_disk_after_some_chunks():
    yield b"half of the "
    raise OSError(errno.ENOSPC, "No space left on device")


def full_disk_in_a_function(file):
    file.write(b"half of the ")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("data", [full_disk_after_some_chunks, full_disk_in_a_function])
def test_a_full_disk_leaves_only_the_old_file(tmp_path, data, overwrite):
    before = {"file": b"old"} if overwrite else {}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    data = data() if data is full_disk_after_some_chunks else data
    with pytest.raises(OSError, match="No space left") as caught:
        write_atomically(tmp_path / "file", data, overwrite=overwrite)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "file")
    assert contents(tmp_path) == before


def test_an_interrupt_leaves_no_temporary_file(tmp_path):
    def interrupted(file):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", interrupted, overwrite=True)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_file_from_another_process_is_not_replaced(tmp_path, monkeypatch, hard_links):
    if not hard_links:
        monkeypatch.setattr(Path, "hardlink_to", refuse_links)

    def slow(file):
        (tmp_path / "file").write_bytes(b"theirs")

    with pytest.raises(InputError, match="exists"):
        write_atomically(tmp_path / "file", slow, overwrite=False)
    assert contents(tmp_path) == {"file": b"theirs"}


def refuse_links(self, target):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_hard_links_works(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "hardlink_to", refuse_links)
    write_atomically(tmp_path / "file", b"new", overwrite=False)
    assert contents(tmp_path) == {"file": b"new"}


def test_the_umask_decides_the_mode(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write_atomically(tmp_path / "file", b"", overwrite=False)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", b"new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_directory_raises(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        write_atomically(tmp_path, b"", overwrite=True)


def test_an_unwritable_path_raises_with_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to("loop")
    for path, reason in [
        (tmp_path / "nowhere" / "file", "No such file or directory"),
        (tmp_path / "file" / "inner", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "loop", "loop|symbolic links"),
    ]:
        with pytest.raises(InputError, match=rf"cannot be written \(.*({reason})") as caught:
            write_atomically(path, b"", overwrite=False)
        assert "\n" not in str(caught.value)
    for path in (tmp_path / "nowhere" / "file", tmp_path / "file" / "inner"):
        with pytest.raises(InputError, match="cannot be written"):
            writable_target(path, overwrite=False)  # before the content exists


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_directory_raises(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        write_atomically(tmp_path / "file", b"", overwrite=False)
