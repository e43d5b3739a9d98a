"""The clients of a soak run: connections that ask, think, and sometimes behave badly, and what they saw."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass

from tests.soak.traffic import WRITE_IDLE_SECONDS, Plan, Plans
from tests.support.raw_client import RawClient, RawResponse

LEAVES_AFTER_SECONDS_MAX = 0.05
SLOW_READ_BYTES, SLOW_READ_SECONDS = 64 * 1024, 0.04
PIECE_KEPT_BYTES = 4096
STALLS_FOR_SECONDS = 4 * WRITE_IDLE_SECONDS
BUFFER_BYTES = 8192
PATIENCE_SECONDS = 60.0
"""Longer than every wait that the gateway allows, however slow the machine."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; times are seconds of the monotonic clock. `status` is None where the
    client did not wait for one."""

    plan: Plan
    sent_at: float
    ended_at: float = 0.0
    status: int | None = None
    outcome: str | None = None
    whole: bool = False
    """The body ended as its framing promised."""
    own: bool | None = None
    """Whether the answer of a 200 is the one to this request; None without such an answer."""
    fault: str | None = None
    """What should not happen to a client, in words."""


class Clients:
    """`run(until)` asks with so many connections at once; `seen` has all that came of it."""

    def __init__(self, port: int, plans: Plans, *, connections: int, think_seconds: float, seed: int) -> None:
        self._port = port
        self._plans = plans
        self._connections = connections
        self._think_seconds = think_seconds
        self._random = random.Random(seed)
        self.seen: list[Seen] = []
        self.in_flight = 0

    @property
    def by_status(self) -> Counter[int | None]:
        return Counter(each.status for each in self.seen)

    async def run(self, until: float) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._connections):
                group.create_task(self._one_connection(until))

    async def _one_connection(self, until: float) -> None:
        client: RawClient | None = None
        await self._think()
        while time.monotonic() < until:
            plan = self._plans.next()
            seen = Seen(plan, time.monotonic())
            self.in_flight += 1
            try:
                if plan.kind in _ON_ITS_OWN:
                    await self._on_its_own(plan, seen)
                else:
                    client = await self._in_order(client, plan, seen)
            except (TimeoutError, OSError, EOFError, AssertionError) as error:
                seen.fault = f"{type(error).__name__}: {error}"[:200]
                if client is not None:
                    await client.leave()
                    client = None
            finally:
                self.in_flight -= 1
                seen.ended_at = time.monotonic()
                self.seen.append(seen)
            await self._think()
        if client is not None:
            await client.leave()

    async def _think(self) -> None:
        await asyncio.sleep(self._random.expovariate(1 / self._think_seconds))

    # ------------------------------------------------------------------ one request

    async def _in_order(self, client: RawClient | None, plan: Plan, seen: Seen) -> RawClient | None:
        """To its end, on the connection of the request before if that is still good; answers which is now."""
        if client is None:
            client = await RawClient(self._port, patience=PATIENCE_SECONDS).__aenter__()
        await client.send(self._plans.request(plan))
        response = await client.response()
        _note(seen, response)
        if response.whole and response.header("connection") != "close":
            return client
        await client.leave()
        return None

    async def _on_its_own(self, plan: Plan, seen: Seen) -> None:
        """On a connection that is not used again."""
        buffer = BUFFER_BYTES if plan.kind.startswith("reads") else None
        async with RawClient(self._port, receive_buffer_bytes=buffer, patience=PATIENCE_SECONDS) as client:
            await client.send(self._plans.request(plan))
            if plan.kind == "leaves at once":
                await asyncio.sleep(self._random.uniform(0, LEAVES_AFTER_SECONDS_MAX))
            elif plan.kind != "leaves in the upload":
                seen.status, _ = await client.head()
                if seen.status == 200:
                    await self._stream(client, plan, seen)

    async def _stream(self, client: RawClient, plan: Plan, seen: Seen) -> None:
        if plan.kind == "reads nothing":
            await asyncio.sleep(STALLS_FOR_SECONDS)
            return
        try:
            text = piece = await client.chunk()
            while piece and plan.kind == "reads slowly":
                await asyncio.sleep(SLOW_READ_SECONDS * len(piece) / SLOW_READ_BYTES)
                piece = await client.chunk()
                text += piece[:PIECE_KEPT_BYTES]
        except (EOFError, ConnectionError):
            return  # the stream was cut: `whole` stays False
        if plan.kind == "reads slowly":
            seen.whole, seen.own = True, plan.id.encode() in text


_ON_ITS_OWN = frozenset(
    {"leaves at once", "leaves in the stream", "leaves in the upload", "reads slowly", "reads nothing"}
)


def _note(seen: Seen, response: RawResponse) -> None:
    seen.status, seen.whole = response.status, response.whole
    seen.outcome = response.header("x-qos-outcome")
    if response.header("x-request-id") != seen.plan.id:
        seen.fault = "the answer has another request's id"
    if response.status == 200 and response.whole:
        seen.own = seen.plan.id.encode() in response.body
