"""What a tenant may use in a minute: taken before anything is sent, settled once, and given back in full
where nothing ran."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.loops import eventually
from tests.support.metered import (
    PLAIN_SUMS,
    Left,
    Spent,
    as_key,
    exactly,
    honest,
    left_to,
    nothing_runs,
)
from tests.support.raw_client import RawClient, RawResponse, ask
from tests.support.scripted_engine import (
    DONE,
    Held,
    Script,
    ScriptedEngine,
    event,
    held_plain,
    plain,
    scripted_engine,
    streaming,
    whole_answer,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

pytestmark = pytest.mark.anyio

LIMITS: dict[str, dict[str, Any]] = {
    "burst": {"tokens_per_minute": 100},
    "one-at-a-time": {"requests_per_minute": 2, "max_in_flight": 1},
    "unlucky": {"tokens_per_minute": 1000, "requests_per_minute": 2, "max_in_flight": 2},
    "uncounted": {"tokens_per_minute": 100},
    "uncounted-and-long": {"tokens_per_minute": 100},
    "uncounted-and-whole": {"tokens_per_minute": 100},
    "leaves-early": {"tokens_per_minute": 1000},
    "overshoots": {"tokens_per_minute": 6000},
    "sent-on": {"tokens_per_minute": 1000, "requests_per_minute": 1},
    "sent-back": {"tokens_per_minute": 1000, "requests_per_minute": 1},
    "wide": {"tenant": "family", "tokens_per_minute": 1000, "max_in_flight": 1},
    "narrow": {"tenant": "family", "tokens_per_minute": 500, "requests_per_minute": 4},
    "parent": {"tokens_per_minute": 500, "trusts_subtenant": True},
    "weighted": {"tokens_per_minute": 1000},
    "only-tokens": {"tokens_per_minute": 1200},
    "only-requests": {"requests_per_minute": 30},
    "impatient": {"tokens_per_minute": 1000, "requests_per_minute": 2},
    "no-limits": {},
}
KEYS = {key: {"tenant": key, **limits} for key, limits in LIMITS.items()}
"""But for the family each key is a tenant of its own."""


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[tuple[ScriptedEngine, ScriptedEngine]]:
    """Two engines that serve the model `pair`."""
    async with scripted_engine() as one, scripted_engine() as other:
        yield one, other


@pytest.fixture(scope="module")
async def gateway(
    engine: ScriptedEngine, pair: tuple[ScriptedEngine, ScriptedEngine]
) -> AsyncIterator[GatewayProcess]:
    """An engine without a limit, one with a single place, one that nobody can connect to, and the pair."""
    leaving = scripted_engine()
    gone = await leaving.__aenter__()
    upstreams: list[dict[str, Any]] = [
        {"name": "wide", "url": engine.url, "models": ["mock-gpu", "any"]},
        {"name": "one-place", "url": engine.url, "models": ["one-place", "any"], "max_in_flight": 1},
        {"name": "gone", "url": gone.url, "models": ["gone", "any"], "health": {"interval_seconds": 600}},
        {"name": "one", "url": pair[0].url, "models": ["pair", "any"]},
        {"name": "other", "url": pair[1].url, "models": ["pair", "any"]},
    ]
    settings = {
        "upstreams": upstreams,
        "upstream_timeouts": {"first_byte_seconds": 1},
        "capacity": PLAIN_SUMS,
        "scheduling": {"deadline_drop": False},
        "classes": {"P2": {"weight": 3}},
    }
    async with running_gateway(settings, keys=KEYS) as gateway:
        await leaving.__aexit__(None, None, None)
        yield gateway


def refused_by_tenant(response: RawResponse) -> str:
    """The message of a refusal by the tenant's own limit."""
    assert (response.status, response.header("x-qos-outcome")) == (429, "rejected_rate")
    assert response.header("x-qos-error-source") == "gateway"
    assert (response.error["type"], response.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    message: str = response.error["message"]
    return message


# ── before anything is sent ──────────────────────────────────────────────────────────────────────────────


async def test_a_burst_is_paid_before_it_is_sent(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Of five at once that cost 60 of a minute's 100 one goes to the engine, the others are refused."""
    engine.play = held = held_plain()
    asked = [asyncio.create_task(ask(gateway.port, as_key("burst", exactly(60)))) for _ in range(5)]
    await held.begun.wait()
    await eventually(lambda: sum(task.done() for task in asked) == 4)
    assert len(held.connections) == 1
    held.released.set()
    answers = [await task for task in asked]
    assert sorted(answer.status for answer in answers) == [200, 429, 429, 429, 429]
    for answer in answers:
        if answer.status == 429:
            assert "the limit of 100 tokens per minute of tenant 'burst'" in refused_by_tenant(answer)
            assert Left.told_by(answer).tokens <= 45


async def test_a_refusal_for_concurrency_costs_no_request(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Who is told that too many of its requests run has not used up one of its two in a minute."""
    engine.play = held = held_plain()
    request = as_key("one-at-a-time", exactly(3))
    async with RawClient(gateway.port) as first:
        await first.send(request)
        await held.begun.wait()
        assert "1 requests in flight" in refused_by_tenant(await ask(gateway.port, request))
        held.released.set()
        assert (await first.response()).status == 200
    engine.play = honest()
    assert (await ask(gateway.port, request)).status == 200
    assert "2 requests per minute" in refused_by_tenant(await ask(gateway.port, request))


async def test_failures_give_everything_back(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A request that fails in whatever way costs no token, no request and no place: two good ones run at
    once afterwards, and cost what they used."""

    def failing(script: Script, **members: Any) -> tuple[Script, bytes]:
        return script, as_key("unlucky", exactly(900, **members))

    async def hang_up(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await asyncio.sleep(0.05)  # not at once: that might be a stale connection, and tried again
        connection.close()

    for status, (script, request) in (
        (404, failing(plain(), model="nobody-serves-this")),
        (400, (plain(), as_key("unlucky", b'{"model":'))),
        (502, failing(hang_up)),
        (502, failing(plain(b"no json"))),
        (504, failing(held_plain())),
        (502, failing(plain(), model="gone")),
        (400, failing(plain(b"{}", status="400 Bad Request"))),
        (500, failing(plain(b"{}", status="500 Internal Server Error"))),
        (502, failing(plain(b"{}", status="502 Bad Gateway"))),
    ):
        engine.play = script
        assert (await ask(gateway.port, request)).status == status
        await nothing_runs(gateway)
        left = await left_to(gateway, "unlucky")
        assert (left.tokens, left.requests) == (1000, 2), f"after a {status}"

    engine.play = held = Held(last=_answer(whole_answer(300, 100)))
    spent = Spent(gateway, "unlucky")
    good = [asyncio.create_task(ask(gateway.port, as_key("unlucky", exactly(300, 100)))) for _ in range(2)]
    await eventually(lambda: len(held.connections) == 2)
    assert "2 requests in flight" in refused_by_tenant(await ask(gateway.port, as_key("unlucky", exactly(3))))
    held.released.set()
    assert [(await task).status for task in good] == [200, 200]
    await spent.exactly(2 * 400)


def _answer(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


async def test_who_never_ran_pays_nothing(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """One who waited in vain, or left while waiting, gets back its tokens and its request."""
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as holder:
        await holder.send(as_key("no-limits", exactly(3, model="one-place")))
        await held.begun.wait()
        waiting = as_key("impatient", exactly(900, model="one-place"))
        late = as_key("impatient", exactly(900, model="one-place"), ("x-stainless-read-timeout", "0.4"))
        async with RawClient(gateway.port) as leaver:
            await leaver.send(waiting)
            await eventually(lambda: _has_queued(gateway, 1))
            assert (await left_to(gateway, "impatient")).requests == 1
            assert "tokens per minute" in refused_by_tenant(await ask(gateway.port, late))
        await eventually(lambda: _has_queued(gateway, 0))
        left = await left_to(gateway, "impatient")
        assert (left.tokens, left.requests) == (1000, 2)
        assert (await ask(gateway.port, late)).header("x-qos-outcome") == "queue_timeout"
        left = await left_to(gateway, "impatient")
        assert (left.tokens, left.requests) == (1000, 2)
        held.released.set()
        assert (await holder.response()).status == 200


async def _has_queued(gateway: GatewayProcess, count: int) -> bool:
    return await gateway.queued() == count


# ── settled by what was used ─────────────────────────────────────────────────────────────────────────────

ONE_TOKEN = event({"id": "cmpl-1", "choices": [{"index": 0, "text": "x"}]})
THE_END = event({"id": "cmpl-1", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    ("key", "allowed"),
    [("uncounted", 60), ("uncounted-and-long", 1)],
    ids=["as allowed", "more than allowed"],
)
async def test_a_stream_without_usage_is_paid_for(
    gateway: GatewayProcess, engine: ScriptedEngine, key: str, allowed: int
) -> None:
    """Sixty tokens that nobody counted for the gateway are counted by it, so the next request finds them
    gone."""
    engine.play = streaming(*[ONE_TOKEN] * 60, THE_END, DONE)
    spent = Spent(gateway, key)
    response = await ask(gateway.port, as_key(key, exactly(10, allowed, stream=True)))
    assert (response.status, response.whole) == (200, True)
    await spent.exactly(70)
    assert refused_by_tenant(await ask(gateway.port, as_key(key, exactly(60))))


async def test_a_plain_answer_without_usage_is_paid_for(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Where the engine does not say what it has used, what was set aside for the answer is its price."""
    engine.play = plain(b'{"id":"cmpl-1","choices":[{"index":0,"text":"some words","finish_reason":"stop"}]}')
    spent = Spent(gateway, "uncounted-and-whole")
    response = await ask(gateway.port, as_key("uncounted-and-whole", exactly(10, 60)))
    assert (response.status, response.whole) == (200, True)
    await spent.exactly(70)


async def test_a_reader_that_leaves_has_used_the_answer(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """A client that hangs up on a large plain answer pays for all of it: the engine has produced it."""
    engine.play = plain(whole_answer(10, 500, content="x" * 8_000_000))
    spent = Spent(gateway, "leaves-early")
    async with RawClient(gateway.port, receive_buffer_bytes=4096) as client:
        await client.send(as_key("leaves-early", exactly(10, 1), id="leaves-early"))
        assert (await client.head())[0] == 200
    line = await gateway.ending("leaves-early")
    assert (line["outcome"], line["output_tokens"]) == ("client_gone_streaming", 500)
    await spent.exactly(510)


async def test_overshoot_is_a_debt(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """An answer that uses 200 tokens more than there are is paid off at 100 a second: the next request is
    told to come back in about two seconds, and passes then."""
    engine.play = honest(6190)
    began = asyncio.get_running_loop().time()
    assert (await ask(gateway.port, as_key("overshoots", exactly(10, 1)))).status == 200
    await nothing_runs(gateway)
    refused = await ask(gateway.port, as_key("overshoots", exactly(10)))
    elapsed = asyncio.get_running_loop().time() - began
    wait = float(refused_by_tenant(refused).removesuffix(" s").rpartition(" ")[2])
    assert 2.1 - elapsed - 0.02 <= wait <= 2.12
    assert Left.told_by(refused).tokens == 0
    engine.play = honest()
    await asyncio.sleep(int(refused.header("retry-after-ms") or "") / 1000)
    assert (await ask(gateway.port, as_key("overshoots", exactly(10)))).status == 200


async def test_weighted_tokens_are_what_counts(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A request of a class of weight 3 takes three times its tokens from the tenant; one whose prompt alone
    would take more than a minute's worth is refused for good."""
    engine.play = honest(50)
    asked = len(engine.requests)
    batch = ("x-request-priority", "P2")
    spent = Spent(gateway, "weighted")
    assert (await ask(gateway.port, as_key("weighted", exactly(200, 50), batch))).status == 200
    await spent.exactly(750)
    never = await ask(gateway.port, as_key("weighted", exactly(334), batch))
    assert (never.status, never.error["code"]) == (400, "request_too_large")
    assert never.error["type"] == "invalid_request_error"
    assert never.error["param"] == "prompt"
    assert "costs about 1002 tokens; tenant 'weighted' has 1000 in a minute" in never.error["message"]
    assert never.header("retry-after") is None
    later = await ask(gateway.port, as_key("weighted", exactly(333), batch))
    assert "could pay this request in about" in refused_by_tenant(later)
    assert len(engine.requests) == asked + 1


# ── sent back by an engine that is full ──────────────────────────────────────────────────────────────────


class FullAtFirst:
    """Engines that send back so many requests in all, and answer the others."""

    def __init__(self, times: int) -> None:
        self._left = times

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        self._left -= 1
        full = plain(b'{"error":{"message":"full"}}', status="503 Service Unavailable")
        await (full if self._left >= 0 else honest(100))(connection, request)


async def test_a_request_sent_back_is_charged_once(
    gateway: GatewayProcess, pair: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    """One engine is full, the other answers: the client sees one answer, and the one request it has in a
    minute is used up then, not before."""
    pair[0].play = pair[1].play = FullAtFirst(1)
    spent = Spent(gateway, "sent-on")
    request = as_key("sent-on", exactly(100, 100, model="pair"), id="sent-on")
    assert (await ask(gateway.port, request)).status == 200
    assert [len(engine.requests) for engine in pair] == [1, 1]
    await spent.exactly(200)
    line = await gateway.ending("sent-on")
    assert (line["outcome"], line["cost"], line["requeued"]) == ("completed", 200, True)
    again = as_key("sent-on", exactly(3, model="pair"))
    assert "1 requests per minute" in refused_by_tenant(await ask(gateway.port, again))


async def test_a_request_sent_back_twice_is_the_clients_to_repeat(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """The only engine is tried once more; its second 503 is the answer, untouched, and costs nothing."""
    asked = len(engine.requests)
    engine.play = FullAtFirst(2)
    request = as_key("sent-back", exactly(100, 100))
    response = await ask(gateway.port, request)
    assert (response.status, response.body) == (503, b'{"error":{"message":"full"}}')
    assert response.header("x-qos-error-source") == "upstream"
    assert len(engine.requests) == asked + 2
    await nothing_runs(gateway)
    left = await left_to(gateway, "sent-back")
    assert (left.tokens, left.requests) == (1000, 1)
    engine.play = FullAtFirst(1)
    assert (await ask(gateway.port, request)).status == 200
    assert (await left_to(gateway, "sent-back")).requests == 0


# ── one tenant ───────────────────────────────────────────────────────────────────────────────────────────


async def test_keys_of_one_tenant_share_its_limits(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Whichever key is used the strictest limit of any of them holds, and all pay from the same bucket; how
    many run at once is a matter of each key."""
    engine.play = honest(100)
    spent = Spent(gateway, "narrow")
    assert (await ask(gateway.port, as_key("wide", exactly(200, 100)))).status == 200
    await spent.exactly(300)
    for key in ("wide", "narrow"):
        left = await left_to(gateway, key)
        assert (left.limit_tokens, left.limit_requests, left.requests) == (500, 4, 3)
    assert "500 tokens per minute" in refused_by_tenant(await ask(gateway.port, as_key("wide", exactly(300))))

    engine.play = held = held_plain()
    async with RawClient(gateway.port) as first, RawClient(gateway.port) as second:
        await first.send(as_key("wide", exactly(3)))
        await eventually(lambda: len(held.connections) == 1)
        assert "1 requests in flight" in refused_by_tenant(
            await ask(gateway.port, as_key("wide", exactly(3)))
        )
        await second.send(as_key("narrow", exactly(3)))
        await eventually(lambda: len(held.connections) == 2)
        held.released.set()
        assert [(await client.response()).status for client in (first, second)] == [200, 200]


async def test_subtenants_share_their_tenants_limits(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Naming another sub-tenant is no way to another bucket, and no metric or log line has its name."""
    engine.play = honest()
    for n, name in enumerate(("x-llm-d-inference-fairness-id", "openai-project")):
        response = await ask(gateway.port, as_key("parent", exactly(400), (name, f"child-{n}")))
        if n == 0:
            assert response.status == 200
        else:
            assert "of tenant 'parent'" in refused_by_tenant(response)
    page = await gateway.quiet()
    assert page.total("requests_total", tenant="parent") >= 2
    assert "child" not in page.text
    assert not any("child" in line for line in gateway.lines)


# ── what the headers say ─────────────────────────────────────────────────────────────────────────────────


def _seconds(duration: str) -> float:
    """Of a reset time such as `12ms`, `1s`, `6m0s`."""
    if duration.endswith("ms"):
        return int(duration.removesuffix("ms")) / 1000
    minutes, _, seconds = duration.removesuffix("s").rpartition("m")
    return int(minutes or 0) * 60 + int(seconds)


async def test_headers_tell_the_limit_that_binds(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """`x-ratelimit-*` show the tenant's own limit where there is one, and the class's where not; when the
    bucket will be full again follows from its rate."""
    class_tokens, class_requests = 5 * 350_000, 1000
    engine.play = honest()
    for key, tokens, requests in (
        ("only-tokens", 1200, class_requests),
        ("only-requests", class_tokens, 30),
        ("no-limits", class_tokens, class_requests),
    ):
        response = await ask(gateway.port, as_key(key, exactly(600)))
        assert response.status == 200
        left = Left.told_by(response)
        assert (left.limit_tokens, left.limit_requests) == (tokens, requests)
        assert left.tokens < tokens
        if key == "only-tokens":  # 20 a second, 600 of them taken just now
            assert 600 <= left.tokens <= 800
            missing = (1200 - left.tokens) / 20
            assert missing - 0.1 <= _seconds(response.header("x-ratelimit-reset-tokens") or "") <= missing + 1
        if key == "only-requests":
            assert left.requests == 29
            assert 0 < _seconds(response.header("x-ratelimit-reset-requests") or "") <= 2


async def test_a_request_unit_is_a_unit(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """However large it is, and however many answers it asks for."""
    before = (await left_to(gateway, "only-requests")).requests
    engine.play = honest()
    began = asyncio.get_running_loop().time()
    response = await ask(gateway.port, as_key("only-requests", exactly(5000, n=8)))
    assert response.status == 200
    left = await left_to(gateway, "only-requests")
    regained = (asyncio.get_running_loop().time() - began) / 2 + 1
    assert before - 1 <= left.requests <= before - 1 + regained
