"""The mock GPU as a process: socket, signals, the ready line, and no life after the parent's."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn

from .app import MockGpuApp
from .gpu_model import SchedulingPolicy, find_preset


def serve_mock_gpu(
    preset: str,
    host: str = "127.0.0.1",
    port: int = 8100,
    *,
    policy: SchedulingPolicy = "fcfs",
    max_num_seqs: int | None = None,
    max_num_queued_reqs: int | None = None,
    exit_with_parent: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT; port 0 takes any free one.

    Prints `ready http://HOST:PORT preset=NAME` once connections are accepted. ValueError for an unknown
    preset or policy or a limit below 1, OSError when the address cannot be listened on.
    """
    app = MockGpuApp(find_preset(preset), policy, max_num_seqs, max_num_queued_reqs=max_num_queued_reqs)
    listener = _listen(host, port)
    if exit_with_parent:
        threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=0,
    )
    shown_host = f"[{host}]" if ":" in host else host
    ready_line = f"ready http://{shown_host}:{listener.getsockname()[1]} preset={preset}"
    _AnnouncedServer(config, ready_line).run([listener])


class _AnnouncedServer(uvicorn.Server):
    """uvicorn, but it says when it is ready and treats a signal as an order that was carried out."""

    def __init__(self, config: uvicorn.Config, ready_line: str) -> None:
        super().__init__(config)
        self._ready_line = ready_line

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


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _exit_at_end_of_stdin() -> None:
    """Ends the process when the other end of stdin is closed, which a dying parent cannot fail to do."""
    while os.read(0, 4096):
        pass
    os._exit(0)
