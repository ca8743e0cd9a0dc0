"""Downloads from a real server on this machine, including failures."""

import contextlib
import gzip
import hashlib
import io
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from probmask.data.download import _check_response, _RefusedError, download
from probmask.data.releases import REMOTES, Remote
from probmask.errors import DownloadError, InputError

CONTENT = bytes(range(256)) * 1000
ADVICE = "; try again, or download it yourself to "


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Server(ThreadingHTTPServer):
    """Answer each path with its actions, one per request; the last one repeats."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.actions = {}
        self.requests = []
        self.closing = threading.Event()
        self.flooded = 0  # bytes that `flood` sent

    def offer(self, name, *actions, content=CONTENT):
        """Serve the content or the actions; return the expected file."""
        self.actions[f"/{name}"] = list(actions) or [serve(content)]
        return Remote(f"{self.url}/{name}", sha256(content), len(content))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        actions = self.server.actions.get(self.path, [status(404)])
        (actions.pop(0) if len(actions) > 1 else actions[0])(self)

    def log_message(self, *_):
        pass

    def begin(self, length, **headers):
        self.send_response(200)
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


def serve(content, **headers):
    def action(handler):
        handler.begin(len(content), **headers)
        handler.wfile.write(content)

    return action


def serve_without_length(content):
    def action(handler):
        handler.begin(None)
        handler.wfile.write(content)

    return action


def status(code):
    return lambda handler: handler.send_error(code)


def redirect_forever(handler):
    handler.send_response(302)
    handler.send_header("Location", handler.path)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def hang_up(handler):
    """Close the connection without an answer."""


def cut(handler):
    """Declare the full length, send half of it."""
    handler.begin(len(CONTENT))
    handler.wfile.write(CONTENT[: len(CONTENT) // 2])


def stall(handler):
    """Send half, then nothing."""
    cut(handler)
    handler.wfile.flush()
    handler.server.closing.wait(60)


def flood(handler, code=200):
    """Send data without end, until the client hangs up."""
    handler.send_response(code)
    handler.send_header("Location", handler.path)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while not handler.server.closing.is_set():
            handler.wfile.write(CONTENT)
            handler.server.flooded += len(CONTENT)


def trickle(handler):
    """Send a few bytes at a time, each well before the timeout."""
    handler.begin(len(CONTENT))
    with contextlib.suppress(OSError):
        while not handler.server.closing.wait(0.05):
            handler.wfile.write(b"..")


def interrupt(handler):
    """Send SIGINT to the main thread in the middle."""
    cut(handler)
    handler.wfile.flush()
    time.sleep(0.05)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    handler.server.closing.wait(60)


@pytest.fixture
def server(monkeypatch):
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name == "PROBMASK_MIRROR":
            monkeypatch.delenv(name)
    with Server() as server:
        # By default, a server checks only twice a second whether it should end.
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("progress", [False, True])
def test_files_are_downloaded_to_a_new_directory(server, tmp_path, capfd, progress):
    remotes = [server.offer("a.bin"), server.offer("b.bin", content=b"other")]
    directory = tmp_path / "new" / "directory"
    paths = download(remotes, directory, progress=progress)
    assert paths == [directory / "a.bin", directory / "b.bin"]
    assert contents(directory) == {"a.bin": CONTENT, "b.bin": b"other"}
    out, err = capfd.readouterr()
    assert out == ""
    if progress:
        assert "a.bin" in err
        assert "256.0/256.0 kB" in err
        assert "b.bin" in err
        assert "5/5 bytes" in err
    else:
        assert err == ""


def test_an_empty_list_creates_no_directory(tmp_path):
    assert download([], tmp_path / "new", progress=True) == []
    assert not (tmp_path / "new").exists()


def test_a_partial_file_never_has_the_final_name(server, tmp_path):
    halfway = []

    def look(handler):
        cut(handler)
        handler.wfile.flush()
        halfway.extend(path.name for path in tmp_path.iterdir())
        handler.wfile.write(CONTENT[len(CONTENT) // 2 :])

    download([server.offer("a.bin", look)], tmp_path, progress=False)
    assert contents(tmp_path) == {"a.bin": CONTENT}
    assert "a.bin" not in halfway


def test_md5_is_accepted_too(server, tmp_path):
    remote = server.offer("a.bin")
    remote = Remote(remote.url, f"md5:{hashlib.md5(CONTENT).hexdigest()}", remote.size)
    download([remote], tmp_path, progress=False)
    download([remote], tmp_path, progress=False)
    assert server.requests == ["/a.bin"]


def test_existing_files_are_not_downloaded_again(server, tmp_path):
    here, missing = server.offer("a.bin"), server.offer("b.bin", content=b"other")
    (tmp_path / "a.bin").write_bytes(CONTENT)
    paths = download([here, missing], tmp_path, progress=False)
    assert paths == [tmp_path / "a.bin", tmp_path / "b.bin"]
    assert server.requests == ["/b.bin"]


@pytest.mark.parametrize(
    ("mine", "reason"),
    [
        (b"mine", "its size is 4 bytes, expected 256,000"),
        (
            CONTENT[::-1],
            f"its digest is {sha256(CONTENT[::-1])}, expected {sha256(CONTENT)}",
        ),
    ],
    ids=["size", "digest"],
)
def test_a_different_file_is_never_overwritten(server, tmp_path, mine, reason):
    remotes = [server.offer("a.bin"), server.offer("b.bin")]
    (tmp_path / "b.bin").write_bytes(mine)
    with pytest.raises(InputError) as caught:
        download(remotes, tmp_path, progress=False)
    assert str(caught.value) == (
        f"{tmp_path / 'b.bin'}: differs from the published file ({reason}); move it away to "
        "download it again."
    )
    assert contents(tmp_path) == {"b.bin": mine}
    assert server.requests == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_directory_or_fifo_with_the_name_of_the_file(server, tmp_path, make):
    make(tmp_path / "a.bin")
    with pytest.raises(InputError, match=r"a.bin: is not a regular file; move it away"):
        download([server.offer("a.bin")], tmp_path, progress=False)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (status(404), "the server answered 404 Not Found"),
        (status(503), "the server answered 503 Service Unavailable"),
        (redirect_forever, "Exceeded 30 redirects"),
        (partial(flood, code=302), "Exceeded 30 redirects"),
        (hang_up, "the connection was interrupted"),
        (cut, "the connection was interrupted"),
        (stall, "the server sent nothing for 0.2 s"),
        (trickle, r"the server sent only \d+ of 256,000 bytes in 0 s"),
        (serve(b"a page to log in"), "received 16 bytes, expected 256,000"),
        (serve(CONTENT + b"."), "received more, expected 256,000"),
        (flood, "received more, expected 256,000"),
        (serve_without_length(CONTENT[:-1]), "received 255,999 bytes, expected 256,000"),
        (
            serve(CONTENT[::-1]),
            f"the downloaded file does not have the digest {sha256(CONTENT)}",
        ),
    ],
)
@pytest.mark.parametrize("progress", [False, True])
def test_a_failure_names_the_reason_and_leaves_no_file(server, tmp_path, action, reason, progress):
    remote = server.offer("a.bin", action)
    with pytest.raises(DownloadError) as caught:
        download([remote], tmp_path, progress=progress, timeout=0.2, retries=0)
    expected = f"{re.escape(remote.url)}: {reason}{re.escape(f'{ADVICE}{tmp_path}.')}"
    assert re.fullmatch(expected, str(caught.value))
    assert contents(tmp_path) == {}
    # A connection transfers at most the file and what the buffers of the system hold.
    assert server.flooded < 100 * len(CONTENT) * len(server.requests)


def test_a_refused_connection(server, tmp_path):
    # A port that is bound but not listening, so no other process can use it.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        remote = Remote(f"http://127.0.0.1:{taken.getsockname()[1]}/a.bin", sha256(b""), 0)
        with pytest.raises(DownloadError, match=r"the connection failed \(Connection refused\)"):
            download([remote], tmp_path, progress=False, retries=0)


def test_a_redirection_from_https_to_http_is_refused():
    response = requests.Response()
    response.raw = io.BytesIO()
    response.url, response.status_code = "https://release.invalid/a.bin", 302
    response.headers["Location"] = "HTTP://elsewhere.invalid/a.bin"
    with pytest.raises(_RefusedError, match="redirects to an address without TLS"):
        _check_response(response)
    response.headers["Location"] = "https://elsewhere.invalid/a.bin"
    _check_response(response)


def test_files_before_a_failure_stay(server, tmp_path):
    remotes = [server.offer("a.bin"), server.offer("b.bin", status(404)), server.offer("c.bin")]
    with pytest.raises(DownloadError, match=r"b\.bin: the server answered 404"):
        download(remotes, tmp_path, progress=False)
    assert contents(tmp_path) == {"a.bin": CONTENT}
    server.offer("b.bin")
    download(remotes, tmp_path, progress=False)
    assert server.requests == ["/a.bin", "/b.bin", "/b.bin", "/c.bin"]


@pytest.mark.parametrize("failure", [cut, status(429)])
def test_a_temporary_failure_is_retried(server, tmp_path, capfd, failure):
    remote = server.offer("a.bin", failure, serve(CONTENT))
    download([remote], tmp_path, progress=True, retries=1)
    assert contents(tmp_path) == {"a.bin": CONTENT}
    assert len(server.requests) == 2
    assert "256.0/256.0 kB" in capfd.readouterr().err


def test_a_permanent_refusal_is_not_retried(server, tmp_path):
    with pytest.raises(DownloadError, match="403 Forbidden"):
        download([server.offer("a.bin", status(403))], tmp_path, progress=False, retries=5)
    assert len(server.requests) == 1


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip"])
def test_a_compressed_file_is_not_decompressed(server, tmp_path, encoding):
    packed = gzip.compress(CONTENT)
    action = serve(packed, Content_Encoding=encoding)
    download([server.offer("a.gz", action, content=packed)], tmp_path, progress=False)
    assert contents(tmp_path) == {"a.gz": packed}


def test_ctrl_c_passes_through_and_leaves_no_file(server, tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            download([server.offer("a.bin", interrupt)], tmp_path, progress=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert contents(tmp_path) == {}


def test_the_mode_of_the_file_follows_the_umask(server, tmp_path):
    before = os.umask(0o027)
    try:
        (path,) = download([server.offer("a.bin")], tmp_path, progress=False)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_log_level_of_pooch_is_restored(server, tmp_path):
    import pooch

    level = pooch.get_logger().level
    download([server.offer("a.bin")], tmp_path, progress=False)
    assert pooch.get_logger().level == level < logging.CRITICAL


@pytest.mark.parametrize("end", ["", "/"])
def test_a_mirror_replaces_everything_before_the_file_name(server, tmp_path, monkeypatch, end):
    remote = server.offer("some/where/a.bin")
    monkeypatch.setenv("PROBMASK_MIRROR", f"{server.url}/some/where{end}")
    elsewhere = Remote("https://release.invalid/~me/v1/a.bin", remote.digest, remote.size)
    download([elsewhere], tmp_path, progress=False)
    assert contents(tmp_path) == {"a.bin": CONTENT}
    assert server.requests == ["/some/where/a.bin"]


def test_the_digest_of_a_mirrored_file_is_checked(server, tmp_path, monkeypatch):
    server.offer("a.bin", serve(CONTENT[::-1]))
    monkeypatch.setenv("PROBMASK_MIRROR", server.url)
    elsewhere = Remote("https://release.invalid/a.bin", sha256(CONTENT), len(CONTENT))
    with pytest.raises(
        DownloadError,
        match=re.escape(f"{server.url}/a.bin: the downloaded file does not have the digest"),
    ):
        download([elsewhere], tmp_path, progress=False, retries=0)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "mirror",
    [
        "/data/mirror",
        "file:///data",
        "host/path",
        "http:///path",
        "http://[bad/path",
        "http://a b/",
    ],
)
def test_an_invalid_mirror(server, tmp_path, monkeypatch, mirror):
    monkeypatch.setenv("PROBMASK_MIRROR", mirror)
    with pytest.raises(
        InputError, match="is not the address of a web server; use http://host/path"
    ):
        download([server.offer("a.bin")], tmp_path, progress=False)
    assert server.requests == []


def test_too_little_space_is_detected_before_the_download(server, tmp_path):
    small, large = server.offer("a.bin"), Remote(f"{server.url}/b.bin", sha256(b""), 2**60)
    with pytest.raises(
        InputError, match=r"needs 1,152,921,504,607,102,976 bytes, but only [\d,]+ are"
    ):
        download([small, large], tmp_path / "new", progress=False)
    assert server.requests == []
    assert contents(tmp_path) == {}


def test_a_file_in_place_of_the_directory(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file: cannot be created \(File exists\)"):
        download([server.offer("a.bin")], tmp_path / "file", progress=False)


def test_a_directory_that_is_not_writable(server, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("root may write everywhere")
    with pytest.raises(InputError, match="is not writable; choose another directory"):
        download([server.offer("a.bin")], tmp_path, progress=False)


def test_without_pooch_the_error_names_the_package(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    remote = server.offer("a.bin")
    with pytest.raises(
        InputError, match=r"^--download needs pooch; run pip install 'probmask\[train\]'"
    ):
        download([remote], tmp_path / "new", progress=False)
    assert contents(tmp_path) == {}
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert download([remote], tmp_path, progress=False) == [tmp_path / "a.bin"]


@pytest.mark.parametrize("name", REMOTES)
def test_the_urls_and_digests_are_well_formed(name):
    for remote in REMOTES[name]:
        assert re.fullmatch(r"https://[\w.-]+/(.+/)?[\w.-]+\.gz", remote.url)
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", remote.digest)
        assert remote.size > 4000
        assert remote.filename == remote.url.split("/")[-1]
    assert len({remote.filename for remote in REMOTES[name]}) == len(REMOTES[name])


def test_no_file_is_listed_twice():
    digests = [remote.digest for remotes in REMOTES.values() for remote in remotes]
    assert len(set(digests)) == len(digests) == 10


def test_the_file_name_excludes_query_and_fragment():
    assert Remote("https://host/a/b.tar.gz?download=1#x", "sha256:", 0).filename == "b.tar.gz"
