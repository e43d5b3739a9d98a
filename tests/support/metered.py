"""Requests whose cost is known to the token, and what a tenant has left of its limits.

A prompt of token ids is counted id by id, and an answer of no tokens reserves none: with an `output_weight`
of 1 the cost of `exactly(60)` is 60.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from tests.support.gateway_process import GatewayProcess
from tests.support.loops import eventually
from tests.support.raw_client import RawResponse, ask, post
from tests.support.scripted_engine import Script, plain, whole_answer
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection

PATH = "/v1/completions"
PLAIN_SUMS = {"tokens_per_second": 1, "burst_seconds": 1_000_000, "output_weight": 1, "cache_weight": 1}
"""A `capacity` that costs what it says, with class buckets that are never empty and hardly refill."""


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


def exactly(tokens: int, answer: int = 0, **members: Any) -> dict[str, Any]:
    """The body of a completion with a prompt of so many tokens, and at most so many in its answer."""
    return {"model": "mock-gpu", "prompt": [1] * tokens, "max_tokens": answer, **members}


def honest(output: int = 0) -> Script:
    """An engine that says it has read what `exactly` gave it, and answered with so many tokens."""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        prompt = json.loads(request.body)["prompt"]
        await plain(whole_answer(len(prompt), output))(connection, request)

    return script


def as_key(
    key: str,
    body: bytes | dict[str, Any],
    *headers: tuple[str, str | bytes],
    id: str | None = None,
    path: str = PATH,
) -> bytes:
    """A request with this key; `id` becomes its `x-request-id`."""
    given: list[tuple[str, str | bytes]] = [bearer(key), *headers]
    return post(path, body, [*given, ("x-request-id", id)] if id is not None else given)


@dataclass(frozen=True, slots=True)
class Left:
    """What the `x-ratelimit-*` headers of a response say."""

    limit_tokens: int
    tokens: int
    limit_requests: int
    requests: int

    @classmethod
    def told_by(cls, response: RawResponse) -> "Left":
        def number(name: str) -> int:
            return int(response.header(f"x-ratelimit-{name}") or "")

        return cls(
            number("limit-tokens"),
            number("remaining-tokens"),
            number("limit-requests"),
            number("remaining-requests"),
        )


async def left_to(gateway: GatewayProcess, key: str) -> Left:
    """What the tenant of this key has left now, by an answer that costs it nothing."""
    response = await ask(gateway.port, as_key(key, b"{"))
    assert response.status == 400
    return Left.told_by(response)


async def nothing_runs(gateway: GatewayProcess) -> None:
    async def idle() -> bool:
        return await gateway.in_flight() == 0

    await eventually(idle)


class Spent:
    """A tenant's tokens from here on, which flow back all the time: `await spent.exactly(60)` holds while the
    tenant lacks 60 tokens, less at most what has flowed in since this was made."""

    def __init__(self, gateway: GatewayProcess, key: str) -> None:
        self._gateway = gateway
        self._key = key
        self._began = asyncio.get_running_loop().time()

    async def exactly(self, tokens: int) -> None:
        """Once nothing runs any more."""
        await nothing_runs(self._gateway)
        left = await left_to(self._gateway, self._key)
        elapsed = asyncio.get_running_loop().time() - self._began
        lowest = left.limit_tokens - tokens
        assert lowest <= left.tokens <= lowest + left.limit_tokens / 60 * elapsed + 1
