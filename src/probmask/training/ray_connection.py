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
    if not (colon and port.isdecimal() and int(port) <= _MAX_PORT):
        return  # "local", "auto", or a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS_TO_CONNECT).close()
    except (OSError, UnicodeError) as error:
        raise _unreachable(address, error) from error


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
