"""A gateway with something to see: every class was served, refused, retried, and its rates were changed.

    async with watched_gateway() as watched:
        await watched.traffic()
        page = await watched.gateway.metrics()

The engine is scripted and says in the end that its memory is nearly full, so the controller cuts the capacity
by one in a hundred each second, for a minute. Where a Valkey can be had the gateway is a fleet of one, so
that what is shown of fleets can be seen as well.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.raw_client import Headers, RawClient, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    scripted_engine,
    streaming,
    token,
    usage_event,
)
from tests.support.scripted_upstream import answer
from tests.support.store_servers import StoreServer
from tests.support.store_servers import binary_of as store_binary

KEYS = {
    "sk-first": {"tenant": "first", "default": "P0"},
    "sk-second": {"tenant": "second", "ceiling": "P1"},
    "sk-third": {"tenant": "third", "requests_per_minute": 1},
}
CLASSES = ("P0", "P1", "P2")

_ANSWER = streaming(ROLE, token("one"), token("two"), token("three"), FINISH, usage_event(9, 3), DONE)


def _load_page(kv_usage: float) -> bytes:
    lines = (
        'vllm:num_requests_running{engine="0"} 1.0',
        'vllm:num_requests_waiting{engine="0"} 0.0',
        f'vllm:kv_cache_usage_perc{{engine="0"}} {kv_usage}',
        "",
    )
    return answer("\n".join(lines).encode(), headers=("content-type: text/plain",))


@dataclass(frozen=True, slots=True)
class WatchedGateway:
    gateway: GatewayProcess
    engine: ScriptedEngine
    shares: bool
    """Whether it has a store."""

    async def traffic(self) -> None:
        """Can be had again. Answers when all of it has left its trace in the metrics."""
        if self.shares:
            await eventually(self._reaches_the_store)
        self.engine.play = _ANSWER
        self.engine.metrics_page = _load_page(0.4)
        for name in CLASSES:
            await self._ask("sk-first", [("x-request-priority", name)])
        await self._ask("sk-second", [("x-request-priority", "P0"), ("x-stainless-retry-count", "1")])
        for _ in range(2):
            await self._ask("sk-third", [])  # one a minute is all that it may
        assert (await self.gateway.ask_to_reload()).status_code == 200
        self.engine.metrics_page = _load_page(0.99)
        await eventually(self._memory_is_full)
        await self._ask("sk-first", [])  # which makes the controller look
        await eventually(self._left_its_trace)

    async def _ask(self, key: str, headers: Headers) -> None:
        async with RawClient(self.gateway.port) as client:
            await client.send(post_chat(chat(stream=True), [("authorization", f"Bearer {key}"), *headers]))
            assert (await client.response()).status in (200, 429)

    async def _reaches_the_store(self) -> bool:
        return (await self.gateway.metrics()).total("fleet_state", state="shared") == 1

    async def _memory_is_full(self) -> bool:
        return (await self.gateway.metrics()).total("upstream_kv_usage_ratio") > 0.9

    async def _left_its_trace(self) -> bool:
        page = await self.gateway.metrics()
        cut, lags = page.total("controller_changes_total", direction="down"), "event_loop_lag_seconds_count"
        return cut > 0 and page.total(lags) > 0


@contextmanager
def _store() -> Iterator[StoreServer | None]:
    binary = store_binary("valkey")
    if binary is None:
        yield None
        return
    server = StoreServer(binary)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def watched_gateway() -> AsyncIterator[WatchedGateway]:
    with _store() as store:
        async with scripted_engine() as engine:
            engine.metrics_page = _load_page(0.4)
            settings = {
                "upstreams": [{"name": "gpu0", "url": engine.url, "load": {"interval_seconds": 0.2}}],
                "controller": {"law": "severity"},
                "classes": {"P0": {"slo": {"max_gap_seconds": 5}}},
                **({} if store is None else {"state": store.url}),
            }
            async with running_gateway(settings, keys=KEYS) as gateway:
                yield WatchedGateway(gateway, engine, shares=store is not None)
