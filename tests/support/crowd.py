"""Many requests of which one after the other gets the engine: who goes first?

engine.play = turnstile = Turnstile()
async with crowd(gateway) as people:
    await people.send("a", post_chat(chat(), id="a"))  # returns once it runs or waits
    turnstile.turn()
    answers = await people.answers()
assert turnstile.came == ["a"]
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.gateway_process import GatewayProcess
from tests.support.loops import eventually
from tests.support.raw_client import RawClient, RawResponse
from tests.support.scripted_engine import plain
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection


class Turnstile:
    """An engine that finishes one request each time it is told to, and notes who came in which order."""

    def __init__(self) -> None:
        self.came: list[str] = []
        """Request ids, as the clients gave them."""
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        unique = request.header("x-request-id") or ""
        self.came.append(unique.rsplit("-", 2)[0])  # the gateway adds two parts of its own
        await self._turns.acquire()
        await plain()(connection, request)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self._turns.release()


class Crowd:
    """Requests that wait for their answers, sent one after the other so that their order is known."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._clients: dict[str, RawClient] = {}

    async def send(self, name: str, request: bytes) -> None:
        """On a connection of its own. Returns once the gateway has it."""
        before = await self._inside()
        self._clients[name] = client = RawClient(self._gateway.port)
        await client.__aenter__()
        await client.send(request)

        async def has_come() -> bool:
            return await self._inside() > before

        await eventually(has_come)

    async def _inside(self) -> int:
        return await self._gateway.queued() + await self._gateway.in_flight()

    async def answer(self, name: str) -> RawResponse:
        return await self._clients[name].response()

    async def answers(self) -> dict[str, RawResponse]:
        return {name: await client.response() for name, client in self._clients.items()}

    async def leave(self) -> None:
        for client in self._clients.values():
            await client.leave()


@asynccontextmanager
async def crowd(gateway: GatewayProcess) -> AsyncIterator[Crowd]:
    people = Crowd(gateway)
    try:
        yield people
    finally:
        await people.leave()
