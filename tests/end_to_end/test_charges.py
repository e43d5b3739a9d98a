"""What is charged is what was used, to the token, however requests end.

`CHARGED_REQUESTS=10000` in the environment makes it ten thousand requests instead of six hundred.
"""

import asyncio
import json
import os
import random
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, ask, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    Script,
    breaking_off,
    choice_event,
    event,
    held_plain,
    held_stream,
    plain,
    scripted_engine,
    streaming,
    token,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

pytestmark = pytest.mark.anyio

REQUESTS = int(os.environ.get("CHARGED_REQUESTS", "600"))
SEED = 31
AT_ONCE = 40
OUTPUT_WEIGHT, CACHE_WEIGHT = 4.0, 0.1
WEIGHTS = {"P0": 1.0, "P1": 2.0, "P2": 0.5}
CAPACITY_SECONDS = 10**9

KINDS = {
    "plain": 20,
    "stream": 30,
    "running totals": 8,
    "no usage": 8,
    "refused by the engine": 6,
    "failed engine": 6,
    "full engine": 4,
    "full once": 4,
    "reset": 5,
    "in-band error": 3,
    "left in the stream": 5,
    "left before the head": 3,
}
"""How requests end, and how often."""

RAN_NOTHING = {"refused by the engine", "failed engine", "full engine"}
CUT_SHORT = {"no usage", "reset", "in-band error", "left in the stream"}
"""Counted by the gateway itself: each token event is one token."""


@dataclass(frozen=True)
class Plan:
    """One request: how it ends, and what the engine says that it used."""

    id: str
    kind: str
    prompt: int
    completion: int
    cached: int

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def plans(count: int) -> list[Plan]:
    chance = random.Random(SEED)
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=count)
    made = []
    for number, kind in enumerate(kinds):
        prompt = chance.randint(1, 3000)
        cached = chance.choice((0, 0, chance.randint(0, prompt)))
        made.append(Plan(f"charge-{number}", kind, prompt, chance.randint(1, 40), cached))
    return made


class Engine:
    """Ends each request as its prompt says. One that is full once takes the request when it comes again."""

    def __init__(self) -> None:
        self._full_before: set[str] = set()

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        plan = Plan(**json.loads(json.loads(request.body)["messages"][0]["content"]))
        await self._script(plan)(connection, request)

    def _script(self, plan: Plan) -> Script:
        words = [token(f" w{number}") for number in range(plan.completion)]
        last = event({"id": "c", "choices": [], "usage": plan.usage})
        if plan.kind == "full once" and plan.id in self._full_before:
            return streaming(ROLE, *words, FINISH, last, DONE)
        self._full_before.add(plan.id)
        match plan.kind:
            case "plain":
                return plain(json.dumps({"id": "c", "choices": [], "usage": plan.usage}).encode())
            case "stream":
                return streaming(ROLE, *words, FINISH, last, DONE)
            case "running totals":
                return streaming(ROLE, *_running_totals(plan), FINISH, last, DONE)
            case "no usage":
                return streaming(ROLE, *words, FINISH, DONE)
            case "refused by the engine":
                return plain(b'{"error":{}}', status="400 Bad Request")
            case "failed engine":
                return plain(b'{"error":{}}', status="500 Internal Server Error")
            case "full engine" | "full once":
                return plain(b'{"error":{}}', status="503 Service Unavailable")
            case "reset":
                return breaking_off(ROLE, *words)
            case "in-band error":
                return streaming(ROLE, *words, event({"error": {"message": "gone"}}), DONE)
            case "left in the stream":
                return held_stream(ROLE, *words)
            case _:
                return held_plain()


def _running_totals(plan: Plan) -> list[bytes]:
    return [
        choice_event({"content": "x"}, usage=plan.usage | {"completion_tokens": number + 1})
        for number in range(plan.completion)
    ]


async def _one(gateway: GatewayProcess, plan: Plan, priority: str, came: asyncio.Event) -> None:
    stream = plan.kind not in ("plain", "left before the head")
    body = chat(json.dumps(asdict(plan)), stream=stream)
    whole = post_chat(body, [("x-request-priority", priority)], id=plan.id)
    if plan.kind == "left in the stream":
        async with RawClient(gateway.port) as client:
            await client.send(whole)
            await client.until(f" w{plan.completion - 1}".encode())
    elif plan.kind == "left before the head":
        async with RawClient(gateway.port) as client:
            await client.send(whole)
            await came.wait()
    else:
        await ask(gateway.port, whole)


async def test_charged_is_used() -> None:
    """Each log line's cost is the formula of what the engine said or, where it said nothing, of what was
    seen; nothing where nothing ran; and the buckets lack the sum of the lines."""
    whats = plans(REQUESTS)
    came = {plan.id: asyncio.Event() for plan in whats}
    async with scripted_engine() as engine:
        play = Engine()

        async def noting(connection: ScriptedConnection, request: RecordedRequest) -> None:
            came[json.loads(json.loads(request.body)["messages"][0]["content"])["id"]].set()
            await play(connection, request)

        engine.play = noting
        settings = {
            "upstreams": [{"name": "gpu0", "url": engine.url, "max_in_flight": AT_ONCE}],
            "capacity": {
                "tokens_per_second": 1,
                "burst_seconds": CAPACITY_SECONDS,
                "output_weight": OUTPUT_WEIGHT,
                "cache_weight": CACHE_WEIGHT,
            },
            "scheduling": {"deadline_drop": False, "max_pending_prefill_tokens": 10**9},
            "circuit_breaker": {"failures": 10**9},
            "classes": {p: {"max_wait_seconds": 600, "weight": w} for p, w in WEIGHTS.items()},
        }
        async with running_gateway(settings) as gateway:
            at_once = asyncio.Semaphore(AT_ONCE)
            chance = random.Random(SEED)
            priorities = [chance.choice(list(WEIGHTS)) for _ in whats]

            async def limited(plan: Plan, priority: str) -> None:
                async with at_once:
                    await _one(gateway, plan, priority, came[plan.id])

            await asyncio.gather(*map(limited, whats, priorities))
            page = await gateway.quiet()
            assert page.total("requests_total") == len(whats)
            lines = {line["request_id"]: line for line in gateway.endings()}
            for plan in whats:
                _check(plan, lines[plan.id])
            for priority, share in (("P0", 0.60), ("P1", 0.35), ("P2", 0.05)):
                await gateway.books_balance(priority, full=share * CAPACITY_SECONDS)


def _check(plan: Plan, line: dict[str, Any]) -> None:
    if plan.kind in RAN_NOTHING:
        assert (line["cost"], line["input_tokens"], line["output_tokens"]) == (0, None, None), plan
        return
    used = (line["input_tokens"], line["cached_tokens"], line["output_tokens"])
    if plan.kind in CUT_SHORT:
        assert used[0] > 0
        assert used[1:] == (0, plan.completion), plan
    elif plan.kind == "left before the head":
        assert used[0] > 0
        assert used[1:] == (0, 0), plan
    else:
        assert used == (plan.prompt, plan.cached, plan.completion), plan
    fresh = used[0] - used[1] * (1 - CACHE_WEIGHT)
    cost = WEIGHTS[line["priority"]] * (fresh + OUTPUT_WEIGHT * used[2])
    assert line["cost"] == pytest.approx(max(cost, 1), abs=0.0006), plan
