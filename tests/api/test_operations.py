"""The operators' port of a gateway with many tenants: others run while it works for an operator."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable

import httpx
import pytest
import structlog

from gateway.api.app import Gateway
from gateway.api.audit import Operator
from gateway.api.configuration import Configuration
from gateway.api.operations import create_operations_app
from gateway.keys import KeyEntry, KeyRing
from gateway.policy.clock import Clock
from gateway.runtime.system_clock import SystemClock
from gateway.settings import Settings
from tests.support.loops import until

pytestmark = pytest.mark.anyio

TENANTS = 1_500
SETTINGS = Settings.model_validate({"upstreams": [{"name": "gpu0", "url": "http://127.0.0.1:9"}]})


class WatchedClock(Clock):
    """Remembers in which threads it was read."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.threads: set[int] = set()

    def now(self) -> int:
        self.threads.add(threading.get_ident())
        return self._clock.now()


def ring() -> KeyRing:
    return KeyRing(
        KeyEntry(
            id=f"key-{n}",
            sha256=hashlib.sha256(b"%d" % n).hexdigest(),
            tenant=f"tenant-{n:04}",
            tokens_per_minute=n,
        )
        for n in range(TENANTS)
    )


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture(scope="module")
async def gateway(clock: WatchedClock) -> AsyncIterator[Gateway]:
    def read() -> Configuration:
        return Configuration(SETTINGS, ring())

    gateway = Gateway(read(), read=read, clock=clock)
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest.fixture(scope="module")
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_operations_app(gateway, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def turns(asked: Awaitable[httpx.Response]) -> tuple[httpx.Response, int]:
    """The answer, and how often others ran before it came."""
    answer = asyncio.ensure_future(asked)
    count = 0
    while not answer.done():
        count += 1
        await asyncio.sleep(0)
    return await answer, count


async def test_a_long_page_of_tenants_is_many_turns(client: httpx.AsyncClient) -> None:
    """Those with nothing here are in the order of their names, with what is left to each."""
    _, few = await turns(client.get("/admin/tenants?limit=1"))
    response, many = await turns(client.get("/admin/tenants?limit=1000"))
    page = response.json()
    assert [tenant["tenant"] for tenant in page["tenants"]] == [f"tenant-{n:04}" for n in range(1_000)]
    assert page["total"] == TENANTS
    assert page["tenants"][999]["tokens"] == {"per_minute": 999, "left": 999}
    assert many >= few + 15


async def test_a_change_is_tried_out_beside_the_loop(gateway: Gateway, clock: WatchedClock) -> None:
    """The keys, which stay as they are, are not gone through again, nor at a reload that finds the same; and
    what was to be said of the configuration was said at the start."""
    clock.threads.clear()
    access, keys, tenants = gateway.edge.access, gateway.keys, gateway.edge.admission.parameters.tenants
    with structlog.testing.capture_logs() as lines:
        told = await gateway.change_settings({"capacity": {"burst_seconds": 0.7}}, Operator("a test"))
        assert told.changed == ("capacity.burst_seconds",)
        assert gateway.edge.admission.parameters.capacity.burst_seconds == 0.7
        told = await gateway.reload()
        assert (told.changed, told.overrides) == (("capacity.burst_seconds",),) * 2
        assert gateway.edge.admission.parameters.capacity.burst_seconds == 0.5
    assert len(clock.threads) > 1
    assert gateway.edge.access is access
    assert gateway.keys is keys
    assert gateway.edge.admission.parameters.tenants is tenants
    assert not [line for line in lines if line["event"].startswith("this limit is 0")]


async def test_advice_is_given_when_it_is_new(gateway: Gateway) -> None:
    """Once, and again only after it had become untrue."""

    async def warned(mode: str) -> int:
        with structlog.testing.capture_logs() as lines:
            await gateway.change_settings({"mode": mode}, Operator("a test"))
        return sum(line["event"].startswith("observe mode") for line in lines)

    assert [await warned(mode) for mode in ("observe", "observe", "enforce", "observe", "enforce")] == [
        1,
        0,
        0,
        1,
        0,
    ]


async def test_the_document_needs_the_token(gateway: Gateway) -> None:
    """As all does that tells something, where there is one; without, it is for this machine's names."""
    for token, headers, status in (
        ("secret", {}, 401),
        ("secret", {"authorization": "Bearer wrong"}, 401),
        ("secret", {"authorization": "Bearer secret"}, 200),
        (None, {}, 200),
        (None, {"host": "evil.example"}, 403),
    ):
        transport = httpx.ASGITransport(create_operations_app(gateway, token))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            response = await client.get("/openapi.json", headers=headers)
            assert response.status_code == status
            assert ("paths" in response.json()) is (status == 200)
            assert (await client.get("/docs")).status_code == 404


class BrokenHistory:
    def take(self, now: int) -> None:
        raise ValueError("nothing can be kept")


async def test_a_history_that_fails_is_in_the_log() -> None:
    """Rather than that its chart stands still and nobody knows why; all else goes on."""
    gateway = Gateway(Configuration(SETTINGS))
    with structlog.testing.capture_logs() as lines:
        await gateway.start()
        gateway.history = BrokenHistory()  # type: ignore[assignment]
        await until(lambda: any(line.get("what") == "history" for line in lines))
        await gateway.stop()
    (failure,) = [line for line in lines if line.get("what") == "history"]
    assert (failure["log_level"], failure["exc_info"]) == ("error", True)
