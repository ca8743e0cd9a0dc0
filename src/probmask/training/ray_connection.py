"""The connection to a Ray cluster, or to one that is started on this machine."""

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

from probmask.errors import InputError
from probmask.launch import available_cores
from probmask.messages import one_line

_SECONDS_TO_CONNECT = 10.0
_MAX_PORT = 65535
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # a frame: its fourth byte is the type
_LOOPBACK = {
    "_node_ip_address": "127.0.0.1",
    "include_dashboard": False,
    "dashboard_host": "127.0.0.1",
}


@contextmanager
def connected(address: str, *, cores: int | None = None) -> Iterator[Any]:
    """Connect to the cluster at ``address``, or start one on this machine ("local").

    A cluster on this machine listens on 127.0.0.1 only. It has ``cores`` cores to reserve, by
    default those that this process may use.

    Yields:
        The module ``ray``.

    Raises:
        InputError: The cluster cannot be reached.
    """
    _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no statistics
    # Ray's future default: leave CUDA_VISIBLE_DEVICES of tasks without GPUs alone. Else Ray warns.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == "local" or _is_only_on_loopback(address):
        # Ray then uses the loopback address, so that no other machine can reach its processes.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray: Any = importlib.import_module("ray")
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        # Ray adds the working directory to the import path of its workers; see `own_code`.
        with chdir(Path.cwd().anchor):
            if address == "local":
                ray.init(address="local", num_cpus=cores or available_cores(), **_LOOPBACK, **quiet)
            else:
                ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _unreachable(address, error) from error
    try:
        yield ray
    finally:
        ray.shutdown()  # also ends the tasks and actors of this process


def _check_reachable(address: str) -> None:
    """Try to connect to the port, because Ray itself would retry for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not (colon and port.isdecimal()):
        return  # "local", "auto", or a name that Ray resolves
    try:
        if int(port) > _MAX_PORT:
            raise ValueError(f"a port is at most {_MAX_PORT}")
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT) as peer:
            if os.environ.get("RAY_USE_TLS", "0") != "1":
                _check_speaks_grpc(peer)
    except (OSError, ValueError) as error:  # UnicodeError is a ValueError
        raise _unreachable(address, error) from error


def _check_speaks_grpc(peer: socket.socket) -> None:
    """Raise a ValueError if the other side does not answer a connection of HTTP/2, as Ray does."""
    peer.sendall(_HTTP2_PREFACE + _EMPTY_SETTINGS)
    answer = b""
    while len(answer) < len(_EMPTY_SETTINGS):
        part = peer.recv(len(_EMPTY_SETTINGS) - len(answer))
        if not part:
            break
        answer += part
    if answer[3:4] != _EMPTY_SETTINGS[3:4]:
        raise ValueError("the program at this address is not Ray")


def _is_only_on_loopback(address: str) -> bool:
    """Return whether a cluster on this machine cannot be reached by the machine's own address.

    Ray replaces a loopback address by that address, and would wait for minutes.
    """
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 1))  # sends nothing; selects the network interface
            own = probe.getsockname()[0]
        socket.create_connection((own, int(port)), _SECONDS_TO_CONNECT).close()
    except OSError:
        return True
    return False


def _unreachable(address: str, error: Exception) -> InputError:
    reason = one_line(error).rstrip(".")
    return InputError(
        f"--ray {address}: cannot be reached: {reason}; pass the address of a running cluster, "
        "or 'local'."
    )
