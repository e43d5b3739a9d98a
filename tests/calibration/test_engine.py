"""The engine that is measured, as far as it can be wrong: what is said then, in one sentence."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.calibration.engine import Engine, EngineFull, EngineProblem, Prompts, PromptTooLong
from gateway.calibration.probes import Bounds, Calibration
from gateway.calibration.suggestion import Stop
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    Script,
    ScriptedEngine,
    event,
    plain,
    raw,
    scripted_engine,
    streaming,
    token,
    usage_event,
    whole_answer,
)
from tests.support.scripted_upstream import RecordedRequest, ScriptedConnection, answer

pytestmark = pytest.mark.anyio

STREAM = streaming(ROLE, token("ba"), token("de"), FINISH, usage_event(64, 4), DONE)
CHAT = "/v1/chat/completions"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def models(*names: str, **members: object) -> Script:
    return plain(json.dumps({"data": [{"id": name, **members} for name in names]}).encode())


def refusal(status: str, message: str) -> Script:
    return plain(json.dumps({"error": {"message": message}}).encode(), status=status)


def by_path(chat: Script, listed: Script) -> Script:
    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await (chat if request.target == CHAT else listed)(connection, request)

    return script


@asynccontextmanager
async def opened(
    chat: Script = STREAM,
    listed: Script | None = None,
    *,
    model: str | None = None,
    key: str | None = None,
    path: str = "",
) -> AsyncIterator[tuple[Engine, ScriptedEngine]]:
    async with scripted_engine() as scripted:
        scripted.play = by_path(chat, models("one") if listed is None else listed)
        engine = Engine(scripted.url + path, model, key, seed=1)
        try:
            yield engine, scripted
        finally:
            await engine.aclose()


async def test_what_is_asked() -> None:
    """The only model there is, streamed, with usage, the key as a bearer token, and no text twice."""
    async with opened(listed=models("one", max_model_len=4096), key="secret", path="/v1/") as (
        engine,
        scripted,
    ):
        await engine.open()
        assert (engine.model, engine.context_tokens, engine.tokens_used) == ("one", 4096, 2 * 68)
        bodies = [json.loads(r.body) for r in scripted.requests if r.target == CHAT]
        assert {r.header("authorization") for r in scripted.requests} == {"Bearer secret"}
    assert all(body["stream_options"] == {"include_usage": True} for body in bodies)
    assert all(body["max_tokens"] == body["min_tokens"] == 4 for body in bodies)
    first, second = (body["messages"][0]["content"] for body in bodies)
    assert first.split()[0] != second.split()[0]


async def test_times_of_an_answer() -> None:
    """One for each piece of text, between sending and the end; the tokens are the engine's count."""
    async with opened() as (engine, _):
        times = await engine.ask(10, 4)
    assert (len(times.events), times.input_tokens, times.output_tokens) == (2, 64, 4)
    assert times.sent <= times.events[0] <= times.events[1] <= times.ended


def test_prompts_are_as_long_as_the_engine_counts() -> None:
    """After it has counted one; and the beginning of each is its own."""
    prompts = Prompts(seed=1)
    text = prompts.text(100)
    assert len(text) == 400
    prompts.counted(text, 200)
    assert len(prompts.text(100)) == 200
    assert len({prompts.text(50)[:20] for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("chat", "listed", "model", "says"),
    [
        (STREAM, refusal("401 Unauthorized", "who are you?"), None, r"401: who are you\?\n--api-key-env"),
        (refusal("401 Unauthorized", "no"), models("one"), None, "answers 401: no"),
        (STREAM, models("one", "two"), "three", "does not serve the model 'three'; it serves one, two"),
        (STREAM, models("one", "two"), None, "which model. it serves one, two; name one with --model"),
        (STREAM, raw(answer(status="404 Not Found")), None, "does not list its models"),
        (STREAM, plain(b"<html>"), None, "no list of models"),
        (STREAM, plain(b"[]"), None, "no list of models"),
        (streaming(ROLE, token("ba"), FINISH, DONE), models("one"), None, "no token counts"),
        (plain(whole_answer()), models("one"), None, "not streamed"),
        (streaming(ROLE, token("ba")), models("one"), None, "not streamed"),
        (streaming(event({"error": {"message": "out of memory"}})), models("one"), None, "out of memory"),
        (refusal("404 Not Found", "no such model"), models("one"), None, "is the URL right"),
        (refusal("500 Internal Server Error", "x" * 900), models("one"), None, "500: x{300} …$"),
    ],
)
async def test_an_engine_that_cannot_be_measured(
    chat: Script, listed: Script, model: str | None, says: str
) -> None:
    """The sentence names what the engine said, or lacks."""
    async with opened(chat, listed, model=model) as (engine, _):
        with pytest.raises(EngineProblem, match=says):
            await engine.open()


async def test_nobody_there() -> None:
    """The address is named."""
    engine = Engine("http://127.0.0.1:1", None, None)
    with pytest.raises(EngineProblem, match=r"http://127.0.0.1:1: no connection"):
        await engine.open()


@pytest.mark.parametrize("url", ["engine:8000", "mock://seed_32k", "http://", "http://user:word@engine"])
def test_a_url_that_is_none(url: str) -> None:
    """It is refused before anything is sent."""
    with pytest.raises(ValueError, match="url"):
        Engine(url, None, None)


async def test_an_engine_that_knows_no_fixed_length() -> None:
    """Members that are vLLM's own are left out once they were refused, and are not tried again."""

    async def strict(connection: ScriptedConnection, request: RecordedRequest) -> None:
        known = "ignore_eos" not in json.loads(request.body)
        await (STREAM if known else refusal("400 Bad Request", "unknown: ignore_eos"))(connection, request)

    async with opened(strict) as (engine, scripted):
        await engine.open()
        assert len([r for r in scripted.requests if r.target == CHAT]) == 3


async def test_a_prompt_that_is_too_long() -> None:
    """It is told from an engine that has no room."""
    async with opened(refusal("400 Bad Request", "too long")) as (engine, _):
        with pytest.raises(PromptTooLong, match="too long"):
            await engine.ask(10_000, 1)
    async with opened(refusal("503 Service Unavailable", "busy")) as (engine, _):
        with pytest.raises(EngineFull, match="busy"):
            await engine.ask(10, 1)


class LoopbackEngine:
    """Takes a millisecond for eight tokens of a prompt and a millisecond for a token, counts bodies' bytes as
    tokens, and has room for so many at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.running = 0

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        if self.running == self.room:
            return await refusal("503 Service Unavailable", "busy")(connection, request)
        self.running += 1
        body = json.loads(request.body)
        prompt, output = len(body["messages"][0]["content"]) // 4, body["max_tokens"]
        await asyncio.sleep(prompt / 8000)
        await connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + ROLE
        )
        for _ in range(output):
            await asyncio.sleep(0.001)
            await connection.send(token("ba"))
        await connection.send(FINISH + usage_event(prompt, output) + DONE)
        self.running -= 1
        connection.close()
        return None


async def test_an_engine_that_refuses_more_at_once() -> None:
    """Its 503 is where the doubling ends, and the suggestion says so."""
    async with opened(LoopbackEngine(room=3)) as (engine, _):
        suggestion = await Calibration(engine, Bounds(30, 20_000), tpot_target=1.0).run()
    assert (suggestion.max_in_flight, suggestion.knee.stop) == (2, Stop.REFUSED)


@pytest.mark.parametrize("bounds", [Bounds(0.3, 500_000), Bounds(30, 700)], ids=["seconds", "tokens"])
async def test_bounds_that_are_too_narrow(bounds: Bounds) -> None:
    """Nothing is suggested from nothing; it is said what to allow more of."""
    async with opened(LoopbackEngine(room=100)) as (engine, _):
        with pytest.raises(EngineProblem, match="--seconds and --tokens"):
            await Calibration(engine, bounds, tpot_target=1.0).run()


async def test_the_tokens_are_bounded() -> None:
    """No level is begun that could exceed them, but for the estimate of a prompt's length."""
    async with opened(LoopbackEngine(room=100)) as (engine, _):
        suggestion = await Calibration(engine, Bounds(30, 6000), tpot_target=1.0).run()
        assert engine.tokens_used <= 6000
    assert suggestion.knee.stop is Stop.BOUNDS
