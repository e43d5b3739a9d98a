"""A transport and a scripted upstream, joined; at the end nothing may be left open."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.upstream.transport import UpstreamTransport
from tests.support.scripted_upstream import Handler, ScriptedConnection, ScriptedUpstream


@asynccontextmanager
async def talking_to(
    handler: Handler, *, path: str = "", host: str = "127.0.0.1", **options: Any
) -> AsyncIterator[tuple[UpstreamTransport, ScriptedUpstream]]:
    async with asyncio.timeout(20), ScriptedUpstream(handler, host=host) as upstream:
        transport = UpstreamTransport(upstream.url + path, **options)
        try:
            yield transport, upstream
        finally:
            await transport.aclose()
        assert transport.in_use == 0
        assert transport.idle == 0


def always(data: bytes) -> Handler:
    """Answer every request with these bytes."""

    async def handler(connection: ScriptedConnection) -> None:
        while await connection.answer(data):
            pass

    return handler


def once(data: bytes) -> Handler:
    """Answer one request with these bytes, then close."""

    async def handler(connection: ScriptedConnection) -> None:
        await connection.answer(data)

    return handler
