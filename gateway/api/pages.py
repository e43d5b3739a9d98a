"""The gateway's own pages: health at once, the others through FastAPI, which is built beside the work.

To import FastAPI and to build an application with it takes about as long as everything else that the gateway
does before it can serve, and serving needs neither. So the applications are built in a thread once the ports
are open; a request that comes earlier waits for that.
"""

import asyncio
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.edge import Edge
from gateway.api.health import LOOKS

_AT_ONCE = ("GET", "HEAD")


class LateApp:
    """The application that `build` answers, built in a thread, once, when it is first asked for."""

    def __init__(self, build: Callable[[], ASGIApp]) -> None:
        self._build = build
        self._building: asyncio.Task[ASGIApp] | None = None

    async def built(self) -> ASGIApp:
        if self._building is None:
            self._building = asyncio.create_task(asyncio.to_thread(self._build))
        return await asyncio.shield(self._building)  # a client that leaves does not take it from the others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = await self.built()
        await app(scope, receive, send)


class Pages:
    """An ASGI application: `/healthz` and `/readyz`, whatever else is ready, and behind them `rest`."""

    def __init__(self, edge: Edge, rest: Callable[[], ASGIApp]) -> None:
        self._edge = edge
        self._rest = LateApp(rest)

    async def built(self) -> None:
        """Begin to build the rest, and wait for it."""
        await self._rest.built()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        look = LOOKS.get(scope["path"]) if scope["type"] == "http" and scope["method"] in _AT_ONCE else None
        if look is None:
            await self._rest(scope, receive, send)
            return
        status, says = look(self._edge)
        body = msgspec.json.encode({"status": says})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
