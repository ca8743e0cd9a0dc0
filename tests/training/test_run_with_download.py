"""Training with `--download`, from a server on this machine."""

import gzip
import hashlib
import math
import struct
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from probmask.cli import main
from probmask.data.releases import REMOTES, Remote
from training.small import snapshot

FEW = ["--set", "data_args.train_images=300", "--set", "data_args.test_images=50"]
SMALL = [
    "--sparsity",
    "0.5",
    "--model",
    "smallconv",
    "--set",
    "model_args.width=4",
    "--epochs",
    "1",
    "--json",
]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """Serve a directory; yield it and the address of the server."""
    served = tmp_path / "served"
    served.mkdir()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield served, f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def idx(count, *shape):
    """Return black images of a shape, or labels that repeat 0 to 9."""
    header = bytes((0, 0, 8, 1 + len(shape))) + struct.pack(f">{1 + len(shape)}I", count, *shape)
    values = bytes(count * math.prod(shape)) if shape else bytes(range(10)) * (count // 10)
    return gzip.compress(header + values, compresslevel=1)


def release(served, address):
    """Write a release of the right shape and size with black images."""
    remotes = []
    for stem, count in (("train", 60_000), ("t10k", 10_000)):
        for kind, shape in (("images-idx3", (28, 28)), ("labels-idx1", ())):
            name = f"{stem}-{kind}-ubyte.gz"
            content = idx(count, *shape)
            (served / name).write_bytes(content)
            digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
            remotes.append(Remote(f"{address}/{name}", digest, len(content)))
    return tuple(remotes)


def test_data_is_downloaded_once_and_trained_on(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(REMOTES, "mnist", release(*server))
    place = tmp_path / "mnist"
    command = ["train", "--data", "mnist", "--data-dir", str(place), *SMALL, *FEW]
    assert main([*command, "--out", str(tmp_path / "missing")]) == 2
    assert "pass --download to download" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "run"), "--download"]) == 0
    assert len(list(place.iterdir())) == 4
    for path in server[0].iterdir():
        path.unlink()
    # The server has no files any more, so the local ones must be used.
    artifact = str(tmp_path / "run" / "model.safetensors")
    assert main(["evaluate", artifact, "--data-dir", str(place), "--download"]) == 0
    assert "of 50 correct" in capsys.readouterr().out


def test_a_file_with_other_content_raises(server, tmp_path, monkeypatch, capsys):
    served, address = server
    (served / "cifar-10-binary.tar.gz").write_bytes(b"not the release")
    monkeypatch.setenv("PROBMASK_MIRROR", address)
    before = snapshot(tmp_path)
    command = ["train", "--data", "cifar10", "--data-dir", str(tmp_path / "data"), "--download"]
    assert main([*command, "--out", str(tmp_path / "run")]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("probmask: ")
    assert printed.count("\n") == 1
    assert "cifar-10-binary.tar.gz" in printed
    after = snapshot(tmp_path)
    assert {key for key, content in after.items() if content is not None} == {
        key for key, content in before.items() if content is not None
    }


def test_data_that_cannot_be_downloaded_raises(tmp_path, capsys):
    command = ["train", "--data", "imagenet", "--data-dir", str(tmp_path), "--download"]
    assert main(command) == 2
    assert "choose from cifar10, cifar100" in capsys.readouterr().err
