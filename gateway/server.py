"""Two listening ports and the signals: the gateway as a process.

uvicorn serves both ports inside one event loop, without its own signal handling: it would tell the
application nothing until all streams have ended. On SIGTERM or SIGINT the gateway drains first; a second
signal ends it at once. On SIGHUP it reads its configuration again.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterable, Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from gateway.api.app import Gateway
from gateway.api.edge import Edge
from gateway.api.inference import TenantApp, create_pages
from gateway.api.pages import Pages
from gateway.api.protocol import GatewayProtocol
from gateway.config_reading import ConfigError
from gateway.telemetry.loop_lag import watch_loop_lag

_log = structlog.get_logger("gateway")

LISTEN_BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than usual clients and load balancers keep an idle connection, so that it is they who close it."""
CLOSING_SECONDS = 1
"""For answers on their way to slow readers, once nothing else is left to wait for."""


class CannotListen(Exception):
    """A port could not be opened."""


async def serve(gateway: Gateway, on_settled: Callable[[], None] = lambda: None) -> None:
    """Run until told to stop; `on_settled` is called when all that belongs to starting is done, which is
    after the gateway is ready. Raises CannotListen."""
    settings = gateway.settings.server
    sockets = [
        _listen(settings.host, settings.port),
        _listen(settings.operations_host, settings.operations_port),
    ]
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: force.set() if stop.is_set() else stop.set())
    reloads = _reload_on_hangup(gateway)
    edge = await gateway.start()
    pages = [create_pages(edge), _operations_pages(gateway, edge)]
    servers = [_server(TenantApp(edge, pages[0])), _server(pages[1])]
    serving = [
        asyncio.create_task(server.serve([opened])) for server, opened in zip(servers, sockets, strict=True)
    ]
    waits = [asyncio.create_task(event.wait()) for event in (stop, force)]
    lag = asyncio.create_task(watch_loop_lag(edge.metrics.loop_lagged, edge.clock))
    settling: list[asyncio.Task[None]] = []
    try:
        for server in servers:
            await server.opened.wait()
        _announce(gateway, sockets)
        settling.append(asyncio.create_task(_settle(pages, on_settled)))
        await asyncio.wait((waits[0], *serving), return_when=asyncio.FIRST_COMPLETED)
        _log.info("draining", in_flight=len(edge.active))
        draining = asyncio.create_task(gateway.drain())
        await asyncio.wait((draining, waits[1]), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
    finally:
        for task in (*waits, *reloads, *settling, lag):
            task.cancel()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving, return_exceptions=True)
        await gateway.stop()
    _log.info("stopped")


def _operations_pages(gateway: Gateway, edge: Edge) -> Pages:
    token = gateway.settings.server.operations_token

    def rest() -> ASGIApp:
        from gateway.api.operations import create_operations_app

        secret = None if token is None else token.get_secret_value()
        return create_operations_app(gateway, secret)

    return Pages(edge, rest)


async def _settle(pages: Iterable[Pages], then: Callable[[], None]) -> None:
    try:
        for each in pages:
            await each.built()
    except Exception:
        _log.exception("the gateway's own pages cannot be built")
    finally:
        then()


def _reload_on_hangup(gateway: Gateway) -> set[asyncio.Task[None]]:
    """On SIGHUP; one after another, as many as come. Answers the set of those under way."""
    reloads: set[asyncio.Task[None]] = set()

    async def reload() -> None:
        with contextlib.suppress(ConfigError):  # which the log has
            await gateway.reload()

    def begin() -> None:
        reload_ = asyncio.create_task(reload())
        reloads.add(reload_)
        reload_.add_done_callback(reloads.discard)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, begin)
    return reloads


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    opened.listen(LISTEN_BACKLOG)
    opened.setblocking(False)
    return opened


def _announce(gateway: Gateway, sockets: list[socket.socket]) -> None:
    tenants, operators = (opened.getsockname() for opened in sockets)
    _log.info(
        "ready",
        api=f"http://{tenants[0]}:{tenants[1]}/v1",
        operations=f"http://{operators[0]}:{operators[1]}",
        upstreams={upstream.name: upstream.url for upstream in gateway.settings.upstreams},
    )


class _Server(uvicorn.Server):
    """One of the two ports: without signal handling of its own, and it says when it is open."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: ASGIApp) -> _Server:
    config = uvicorn.Config(
        app,
        http=GatewayProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=[("server", "qos-gateway")],
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
        reset_contextvars=False,
    )
    return _Server(config)


def quiet_uvicorn() -> None:
    """uvicorn's own lines tell nothing that ours do not; a response cut on purpose is no error of it."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    logging.getLogger("uvicorn.access").setLevel(logging.CRITICAL)
