"""Bodies that look like JSON and could be read differently by two readers: what passes goes up as it came and
is paid for, and nothing else passes."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.raw_client import RawClient, RawResponse, ask, chat, post_chat
from tests.support.scripted_engine import (
    DONE,
    FINISH,
    ROLE,
    ScriptedEngine,
    event,
    held_plain,
    plain,
    scripted_engine,
    streaming,
    token,
)

pytestmark = pytest.mark.anyio

CAPACITY = 350_000
"""Of P1's bucket, in tokens; its refill is a third of a token a second."""
MESSAGES = '"messages":[{"role":"user","content":"hi"}]'
GOOD = f'"model":"mock-gpu",{MESSAGES}'


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with scripted_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def gateway(engine: ScriptedEngine) -> AsyncIterator[GatewayProcess]:
    settings = {
        "upstreams": [
            {"name": "gpu0", "url": engine.url, "models": ["mock-gpu"]},
            {"name": "ranked", "url": engine.url, "models": ["ranked"], "engine_priority": "vllm"},
        ],
        "capacity": {"tokens_per_second": 1, "burst_seconds": 1_000_000},
        "circuit_breaker": {"failures": 1000},
    }
    async with running_gateway(settings) as gateway:
        yield gateway
        assert (await gateway.metrics()).are_numbers
        assert [line for line in gateway.lines if "NaN" in line or "Infinity" in line] == []


async def level(gateway: GatewayProcess) -> float:
    response = await ask(gateway.operations_port, b"GET /admin/state HTTP/1.1\r\nhost: g\r\n\r\n", "GET")
    pool = next(pool for pool in response.json["pools"] if "gpu0" in pool["upstreams"])
    return float(pool["classes"]["P1"]["bucket_tokens"])


async def refused(gateway: GatewayProcess, engine: ScriptedEngine, body: bytes) -> RawResponse:
    """The answer to a body that must not go up."""
    asked = len(engine.requests)
    response = await ask(gateway.port, post_chat(body))
    assert response.status == 400
    assert len(engine.requests) == asked
    return response


async def passed(gateway: GatewayProcess, engine: ScriptedEngine, body: bytes) -> None:
    """This body goes up, byte for byte."""
    engine.play = plain()
    assert (await ask(gateway.port, post_chat(body))).status == 200
    assert engine.last.body == body


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────


async def reserved(gateway: GatewayProcess, engine: ScriptedEngine, member: str) -> float:
    """Tokens held for a request with this member while it runs; afterwards the bucket has no more than
    before."""
    before = await level(gateway)
    engine.play = held = held_plain()
    body = f"{{{GOOD}{member}}}".encode()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(body))
        await held.begun.wait()
        during = await level(gateway)
        held.released.set()
        assert (await client.response()).status == 200
    assert engine.last.body == body
    await gateway.quiet()
    assert await level(gateway) <= before + 30, "the refill alone may raise it"
    return before - during


async def test_every_limit_of_an_answer_reserves_something(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """null is as good as nothing; 0 and its odd spellings still cost the prompt; the largest number that is
    one costs no more than there is. None of them fills the bucket."""
    absent = await reserved(gateway, engine, "")
    assert 1 <= absent <= CAPACITY
    assert await reserved(gateway, engine, ',"max_tokens":null') == pytest.approx(absent, abs=absent / 4)
    for value in ("0", "-0", "1", "16.0", "1e2", "1e-400", str(2**53 - 1)):
        assert 1 <= await reserved(gateway, engine, f',"max_tokens":{value}') <= CAPACITY


async def test_numbers_nobody_here_reads(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Numbers beyond what a float or an int holds go up digit by digit: the engine may judge them."""
    for member in (
        '"temperature":1e999',
        '"seed":' + "7" * 5000,
        '"seed":-' + "7" * 5000,
        '"top_p":0.' + "1" * 5000,
        '"x":{"seed":9007199254740993,"a":1.0,"b":1E2,"c":-0}',
    ):
        await passed(gateway, engine, f"{{{GOOD},{member}}}".encode())


@pytest.mark.parametrize(
    "member",
    [
        '"temperature":NaN',
        '"x":{"y":[-Infinity]}',
        '"seed":-',
        '"seed":01',
        '"seed":+1',
        '"seed":.5',
        '"seed":0x10',
        '"seed":1_000',
        '"max_tokens":' + "1" * 5000,
        '"max_tokens":1e999',
        '"max_tokens":-1e-9',
        '"max_completion_tokens":{}',
        '"n":1' + "0" * 30,
    ],
    ids=lambda member: member[:30],
)
async def test_what_is_no_number(gateway: GatewayProcess, engine: ScriptedEngine, member: str) -> None:
    """What some readers take for a number is refused, and so is a limit that is none."""
    await refused(gateway, engine, f"{{{GOOD},{member}}}".encode())


async def test_an_engine_that_writes_no_numbers(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """NaN and absurd counts in an engine's answers are passed on, in a stream, and get into no metric."""
    odd = event('{"choices":[{"index":0,"delta":{"content":"x"},"logprobs":{"a":NaN}}]}')
    counts = event('{"choices":[],"usage":{"prompt_tokens":1e999,"completion_tokens":-Infinity}}')
    huge = event('{"choices":[],"usage":{"prompt_tokens":-5,"completion_tokens":1' + "0" * 30 + "}}")
    before = await level(gateway)
    for strange in (odd, counts, huge):
        engine.play = streaming(ROLE, token("x"), strange, FINISH, DONE)
        wants_usage = chat(stream=True, stream_options={"include_usage": True})
        response = await ask(gateway.port, post_chat(wants_usage))
        assert (response.status, response.whole) == (200, True)
        assert strange in response.body
    for usage in ('{"prompt_tokens":1e999}', '{"completion_tokens":-7}', '{"total_tokens":"x"}', "[]"):
        engine.play = plain(f'{{"choices":[],"usage":{usage}}}'.encode())
        assert (await ask(gateway.port, post_chat(chat()))).status in (200, 502)
    page = await gateway.quiet()
    assert page.are_numbers
    assert await level(gateway) <= before + 30


# ── nesting ──────────────────────────────────────────────────────────────────────────────────────────────


def _tool(levels: int) -> bytes:
    schema = '{"type":"object","properties":' * levels + "{}" + "}" * levels
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}'
    return f'{{{GOOD},"tools":[{tool}]}}'.encode()


async def test_nesting_where_it_is_legal(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """A schema of a hundred levels passes as it came, one of two thousand does not."""
    await passed(gateway, engine, _tool(100))
    response = await refused(gateway, engine, _tool(2000))
    assert "nested" in response.error["message"]


async def test_a_hundred_nested_bodies_and_a_good_one(
    gateway: GatewayProcess, engine: ScriptedEngine
) -> None:
    """Bodies nested too deeply in every place at once harm nobody."""
    deep = b"[" * 20_000 + b"]" * 20_000
    shapes = (deep, _tool(2000), b'{"messages":' + deep + b',"model":"mock-gpu"}', b'{"a":' * 20_000)
    await asyncio.gather(*(refused(gateway, engine, shapes[n % len(shapes)]) for n in range(100)))
    await passed(gateway, engine, f"{{{GOOD}}}".encode())


# ── the same name twice ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("members", "param"),
    [
        (f'{GOOD},"max_tokens":1,"x":2,"max_tokens":100000', "max_tokens"),
        (f'{GOOD},"max_tokens":1,"max\\u005ftokens":100000', "max_tokens"),
        (f'{GOOD},"mod\\u0065l":"other"', "model"),
        (f'"\\u006dodel":"other",{GOOD}', "model"),
        (f'{GOOD},"stream":false,"stream":true', "stream"),
        (f'{GOOD},"messages":[]', "messages"),
        (f'{GOOD},"n":1,"\\u006e":100', "n"),
        (f'{GOOD},"stream":true,"stream_options":{{"include_usage":true,"include_usage":false}}', None),
        (f'{GOOD},"priority":0,"priority":1', "priority"),
        (f'{GOOD},"\U0001f600":1,"\\ud83d\\ude00":2', "\U0001f600"),
        (f'{GOOD},"":1,"":2', ""),
        (f'{GOOD},"a\\/b":1,"a/b":2', "a/b"),
    ],
    ids=range(12),
)
async def test_a_name_given_twice(
    gateway: GatewayProcess, engine: ScriptedEngine, members: str, param: str | None
) -> None:
    """However it is spelled it is refused by its name: one reader takes the first, another the last."""
    response = await refused(gateway, engine, f"{{{members}}}".encode())
    assert response.error["code"] == "duplicate_key"
    if param:
        assert response.error["param"] == param


async def test_a_name_given_twice_inside_a_message(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """It goes up as it came, and what is paid for is the last, which is what engines read."""
    message = '{"role":"user","content":"hi","content":"LONG"}'.replace("LONG", "word " * 1000)
    body = f'{{"model":"mock-gpu","max_tokens":1,"messages":[{message}]}}'.encode()
    before = await level(gateway)
    engine.play = held = held_plain()
    async with RawClient(gateway.port) as client:
        await client.send(post_chat(body))
        await held.begun.wait()
        assert before - await level(gateway) > 300
        held.released.set()
        assert (await client.response()).status == 200
    assert engine.last.body == body


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────────

FRAGILE = (
    b'{ "messages" : [{"role":"user","content":"\\u00e9 \xc3\xa9 \\ud83c\\udf0d"}],\n"seed":9007199254740993,'
    b'"z":{"b":1,"a":[1.0,1E2,-0]},"model":"MODEL" ,\t"seed_too":1e999%b}'
)


@pytest.mark.parametrize(
    ("given", "model", "after"),
    [
        (b"", b"mock-gpu", FRAGILE % b""),
        (b', "priority" : 3', b"mock-gpu", FRAGILE % b""),
        (b"", b"ranked", b'{"priority":1,' + (FRAGILE % b"")[1:]),
        (b', "priority" : 3', b"ranked", FRAGILE % b', "priority" : 1'),
        (b',"request_id":"x" , "y":2', b"mock-gpu", FRAGILE % b' , "y":2'),
    ],
    ids=["nothing", "taken out", "put in", "replaced", "in the middle"],
)
async def test_an_edit_changes_one_member(
    gateway: GatewayProcess, engine: ScriptedEngine, given: bytes, model: bytes, after: bytes
) -> None:
    """Order, spacing, digits, escapes and unknown members stay, and equal requests stay equal."""
    engine.play = plain()
    for _ in range(2):
        body = (FRAGILE % given).replace(b"MODEL", model)
        assert (await ask(gateway.port, post_chat(body))).status == 200
    one, other = engine.requests[-2:]
    assert one.body == other.body
    assert json.loads(one.body.replace(b"1e999", b"1")) == json.loads(
        after.replace(b"MODEL", model).replace(b"1e999", b"1")
    )
    stays = (FRAGILE % b"").replace(b"MODEL", model)[1:-1]
    assert stays in one.body


# ── text that is none, or in another coding ──────────────────────────────────────────────────────────────

TEXT = f"{{{GOOD}}}"


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-16-le"),
        TEXT.encode("utf-32-be"),
        TEXT.replace("hi", "caf\xe9").encode("latin-1"),
        TEXT.encode().replace(b"hi", b"\xc0\xaf"),
        TEXT.encode().replace(b"hi", b"\xed\xa0\x80"),
        TEXT.encode().replace(b"hi", b"\xf5\x80\x80\x80"),
        TEXT.replace("hi", "a\nb").encode(),
        TEXT.replace("hi", "a\x00b").encode(),
        TEXT.replace("hi", "\\x41").encode(),
        TEXT.replace("mock-gpu", "\\udc00").encode(),
        f'{{{GOOD},"\\ud800":1}}'.encode(),
        TEXT.replace("hi", "\\ud800").encode(),
        TEXT.encode() + b"\x00",
        f"{TEXT}\n{TEXT}".encode(),
        f"{{/* {GOOD} */ {GOOD}}}".encode(),
        TEXT.replace('"', "'").encode(),
        b"model=mock-gpu&messages=hi",
        b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nmock-gpu\r\n--x--\r\n',
    ],
    ids=[
        *("BOM", "UTF-16", "UTF-16 without BOM", "UTF-32", "Latin-1", "overlong", "surrogate in UTF-8"),
        *(
            "beyond Unicode",
            "line break",
            "NUL",
            "odd escape",
            "lone surrogate as model",
            "as name",
            "as text",
        ),
        *("NUL behind", "two lines", "comment", "single quotes", "form", "multipart"),
    ],
)
async def test_a_body_for_another_reader(
    gateway: GatewayProcess, engine: ScriptedEngine, body: bytes
) -> None:
    """JSON in UTF-8 is what is read here; what a looser reader would make of it is not passed to one."""
    response = await refused(gateway, engine, body)
    assert response.error["type"] == "invalid_request_error"
    assert len(response.error["message"]) < 300


async def test_what_json_allows(gateway: GatewayProcess, engine: ScriptedEngine) -> None:
    """Escaped surrogate pairs, escaped control characters, line separators and space of all four kinds."""
    content = "\\ud83d\\ude00 \\u0000 \\/ \u2028 \x7f \U0001f600"
    body = f" \r\n\t{{{GOOD}}}\n".replace("hi", content).encode()
    await passed(gateway, engine, body)
