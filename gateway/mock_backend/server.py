"""The mock GPU as a process: socket, signals, the ready line, and no life after the parent's."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .app import MockGpuApp
from .fault_injection import FaultInjector
from .faults import FaultOptions
from .gpu_model import SchedulingPolicy, find_preset

_BACKLOG = 2048
_NO_FAULTS = FaultOptions()


def serve_mock_gpu(
    preset: str,
    host: str = "127.0.0.1",
    port: int = 8100,
    *,
    policy: SchedulingPolicy = "fcfs",
    max_num_seqs: int | None = None,
    max_num_queued_reqs: int | None = None,
    faults: FaultOptions = _NO_FAULTS,
    exit_with_parent: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; port 0 takes any free one.

    Prints `ready http://HOST:PORT preset=NAME` once connections are accepted. ValueError for an unknown
    preset or policy or a limit below 1, OSError when the address cannot be listened on.
    """
    app = MockGpuApp(find_preset(preset), policy, max_num_seqs, max_num_queued_reqs=max_num_queued_reqs)
    listener = _bound(host, port)
    listener.listen(_BACKLOG)
    if exit_with_parent:
        threading.Thread(target=exit_at_end_of_stdin, daemon=True).start()
    shown_host = f"[{host}]" if ":" in host else host
    ready_line = f"ready http://{shown_host}:{listener.getsockname()[1]} preset={preset}"
    _MockServer(app, faults, ready_line).run([listener])


class _MockProtocol(HttpToolsProtocol):
    """uvicorn's, but what answers has the connection at hand."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


class _MockServer(uvicorn.Server):
    """uvicorn, but it says when it is ready, treats a signal as an order that was carried out, and can be
    out of reach for a while."""

    def __init__(self, app: MockGpuApp, faults: FaultOptions, ready_line: str) -> None:
        config = uvicorn.Config(
            FaultInjector(app, faults, self.stop_listening),
            loop="uvloop",
            http=_MockProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=0,
        )
        super().__init__(config)
        self._ready_line = ready_line
        self._out_of_reach: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which raises the signal once more after the shutdown."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._ready_line, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Streams are broken off, as by an engine that is killed; their cancellation is no news.
        logging.getLogger("uvicorn.error").disabled = True
        super().handle_exit(sig, frame)

    def stop_listening(self, seconds: float) -> None:
        """Refuse connections for so long; those that carry no request are closed, the others after it.
        Nothing more happens while it is so already."""
        if self._out_of_reach is not None and not self._out_of_reach.done():
            return
        (listener,) = self.servers
        host, port = listener.sockets[0].getsockname()[:2]
        listener.close()
        self.servers = []
        for connection in list(self.server_state.connections):
            connection.shutdown()
        # Bound at once, so that nobody else gets the port; but as long as it does not listen it refuses.
        self._out_of_reach = asyncio.create_task(self._listen_again(_bound(host, port), seconds))

    async def _listen_again(self, listener: socket.socket, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except BaseException:
            listener.close()
            raise
        listener.listen(_BACKLOG)
        protocol = partial(
            _MockProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(protocol, sock=listener, backlog=_BACKLOG)]


def _bound(host: str, port: int) -> socket.socket:
    """A socket that has the address and does not listen yet."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if bound.family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def exit_at_end_of_stdin() -> None:
    """Ends the process when the other end of stdin is closed, which a dying parent cannot fail to do."""
    while os.read(0, 4096):
        pass
    os._exit(0)
