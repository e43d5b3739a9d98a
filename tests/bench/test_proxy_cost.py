"""What `make bench` counts with: its arithmetic, its clocks, its engine, and how it knows a wrong answer."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.settings import Settings
from tests.benchmarks.proxy_cost import engine
from tests.benchmarks.proxy_cost.client import Connection, Exchange, WrongAnswer, chat_body, chat_request
from tests.benchmarks.proxy_cost.contenders import CONTENDERS, Setting, gateway_settings
from tests.benchmarks.proxy_cost.cpu_time import process_tree, tree_cpu_seconds
from tests.benchmarks.proxy_cost.engine_answers import CHUNKS, STREAM
from tests.benchmarks.proxy_cost.figures import Goal, RoundFigures, Spread, ratio, spread
from tests.benchmarks.proxy_cost.machine import Machine
from tests.benchmarks.proxy_cost.paced_load import plain_latency, stream_times
from tests.benchmarks.proxy_cost.report import Result
from tests.benchmarks.proxy_cost.running import set_pace
from tests.benchmarks.proxy_cost.wrk import read_output

MILLISECOND = 1_000_000

# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────────────


def _round(**plain_cpu_us: float) -> dict[str, RoundFigures]:
    names = {"gateway": "qos-gateway"}
    return {names.get(name, name): RoundFigures(plain_cpu_us=us) for name, us in plain_cpu_us.items()}


ROUNDS = [
    _round(gateway=100, nginx=50),
    _round(gateway=300, nginx=100),
    _round(gateway=90, nginx=90),
    _round(gateway=500),
    _round(nginx=1),
]
"""Twice a contender is missing, as after a wrong answer."""


def test_a_ratio_is_taken_within_each_round() -> None:
    """Its median is that of the rounds' ratios, not the ratio of two medians, which here is 200 / 70."""
    assert ratio(ROUNDS, "plain_cpu_us", "nginx") == Spread(median=2.0, low=1.0, high=3.0)


def test_a_spread_is_over_the_rounds_that_have_the_figure() -> None:
    """With an even number of them the median lies between two."""
    assert spread(ROUNDS, "qos-gateway", "plain_cpu_us") == Spread(median=200, low=90, high=500)
    assert spread(ROUNDS, "qos-gateway", "gap_p99_ms") is None
    assert spread(ROUNDS, "litellm", "plain_cpu_us") is None


@pytest.mark.parametrize(
    ("must", "stretch", "verdict"),
    [(1.9, 1.5, "not met"), (2.0, 1.5, "ok"), (2.0, None, "ok"), (3.0, 2.0, "ok, stretch")],
)
def test_a_goal_is_met_by_the_median(must: float, stretch: float | None, verdict: str) -> None:
    """One bad round does not spoil it, and one good round does not save it."""
    goal = Goal("CPU", "plain_cpu_us", must, stretch, peer="nginx")
    assert goal.verdict(goal.measured(ROUNDS)) == verdict


def test_a_goal_without_a_peer_is_not_met_by_silence() -> None:
    """Nothing measured is neither good nor bad."""
    goal = Goal("CPU", "plain_cpu_us", 1.0, peer="litellm")
    assert goal.verdict(goal.measured(ROUNDS)) == "not measured"


def test_gaps_are_between_reads_and_chunks_of_one_read_have_none() -> None:
    """Chunks at 0, 10, 10 and 40 ms: gaps of 10, 0 and 30."""
    data = b"data: {}\n\n"
    exchange = Exchange(
        sent_at=-5 * MILLISECOND,
        body=[data, data * 2, data],
        read_at=[0, 10 * MILLISECOND, 40 * MILLISECOND],
    )
    times = stream_times([exchange])
    assert (times.chunks, times.chunks_per_read) == (4, 4 / 3)
    assert (times.gap_p50, times.gap_max, times.first_chunk_p50) == (10, 30, 5)


def test_a_chunk_that_is_cut_anywhere_is_counted_once() -> None:
    """Reads end where they like."""
    stream = b'data: {"a":1}\n\ndata: {"a":2}\n\ndata: [DONE]\n\n'
    for cut in range(1, len(stream)):
        exchange = Exchange(body=[stream[:cut], stream[cut:]], read_at=[0, 1])
        assert sum(exchange.chunks_by_read) == 2, stream[:cut]


# ── CPU time ─────────────────────────────────────────────────────────────────────────────────────────────

BURN = """
import sys, time
while time.process_time() < 0.08:
    pass
print("burnt", flush=True)
sys.stdin.readline()
"""
SHELL = '"$0" -c "$1"; echo ended; read line'


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    """What a child of a process burns counts, while it runs and when it has ended."""
    with subprocess.Popen(
        ["sh", "-c", SHELL, sys.executable, BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdin is not None
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"burnt\n"
        assert len(list(process_tree(shell.pid))) == 2
        while_running = tree_cpu_seconds(shell.pid)
        shell.stdin.write(b"\n")
        shell.stdin.flush()
        assert shell.stdout.readline() == b"ended\n"
        assert list(process_tree(shell.pid)) == [shell.pid]
        assert tree_cpu_seconds(shell.pid) >= while_running >= 0.06
        shell.communicate(b"\n")
    with pytest.raises(ProcessLookupError):
        tree_cpu_seconds(shell.pid)


# ── the engine stand-in ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with await engine.listen() as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(url: str, request: bytes) -> Exchange:
    connection = await Connection.open(url)
    try:
        async with asyncio.timeout(10):
            return await connection.exchange(request)
    finally:
        connection.close()


@pytest.mark.anyio
@pytest.mark.parametrize("pace", [("turns", 0), ("turns", 0.2), ("clocks", 0.2)])
async def test_the_engine_streams_whole_answers_at_any_pace(url: str, pace: tuple[str, float]) -> None:
    """Two requests on one connection, and others beside it, each get all chunks and the end."""
    await set_pace(url, *pace)  # type: ignore[arg-type]
    request = chat_request(url, {}, stream=True)
    connection = await Connection.open(url)
    async with asyncio.timeout(10):
        exchanges = [*await asyncio.gather(*(ask(url, request) for _ in range(3)))]
        exchanges += [await connection.exchange(request), await connection.exchange(request)]
    connection.close()
    for exchange in exchanges:
        exchange.check_stream()
        assert sum(exchange.chunks_by_read) == CHUNKS
        assert b'"usage"' not in b"".join(exchange.body)


@pytest.mark.anyio
async def test_the_engine_tells_usage_to_who_asks_for_it(url: str) -> None:
    """One more event, ahead of [DONE]."""
    asked = {**json.loads(chat_body(stream=True)), "stream_options": {"include_usage": True}}
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\ncontent-length: {len(body)}\r\n\r\n"
    exchange = await ask(url, head.encode() + body)
    *_, usage, done = b"".join(exchange.body).strip().split(b"\n\n")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == CHUNKS
    assert done == b"data: [DONE]"


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_the_engine_answers_what_routers_ask(url: str, path: str) -> None:
    """Some take no engine that does not."""
    assert (await ask(url, f"GET {path} HTTP/1.1\r\nhost: e\r\n\r\n".encode())).status == 200


@pytest.mark.anyio
async def test_an_open_load_counts_every_answer(url: str) -> None:
    """As many as arrive at that rate, all checked."""
    latency = await plain_latency(url, {}, requests_per_second=400, seconds=0.1, seed=1)
    assert latency.requests_per_second * 0.1 == pytest.approx(40, abs=25)
    assert 0 < latency.p50 <= latency.p99


# ── wrong answers ────────────────────────────────────────────────────────────────────────────────────────


def _payload(pieces: tuple[bytes, ...]) -> bytes:
    """The body of these chunks, without framing."""
    data = b"".join(pieces)
    return b"".join(b"data: " + event.partition(b"\n\n")[0] + b"\n\n" for event in data.split(b"data: ")[1:])


WHOLE = _payload(tuple(STREAM))
WORD = b'{"content":" measured"}'


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b"busy", "status 503: busy"),
        (200, WHOLE.replace(b"data: [DONE]\n\n", b""), "no \\[DONE\\]"),
        (200, WHOLE.replace(WORD, b'{"content":""}', 1), "characters"),
        (
            200,
            WHOLE.replace(WORD, b"{}", 1).replace(WORD, b'{"content":" measured measured"}', 1),
            "61 words",
        ),
        (200, b"data: [1]\n\ndata: [DONE]\n\n", "not a stream"),
    ],
    ids=["status", "no end", "a word lost", "two words merged", "other events"],
)
def test_a_stream_that_is_not_the_engines_is_wrong(status: int, body: bytes, says: str) -> None:
    """A proxy that loses or holds back something is not measured at all."""
    Exchange(status=200, body=[WHOLE]).check_stream()
    with pytest.raises(WrongAnswer, match=says):
        Exchange(status=status, body=[body]).check_stream()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"choices":[{"message":{"content":"x"}}]}'])
def test_a_plain_answer_needs_content_and_usage(body: bytes) -> None:
    """An error page with status 200 is none."""
    with pytest.raises(WrongAnswer):
        Exchange(status=200, body=[body]).check_plain()


@pytest.mark.parametrize("error", ["status_errors", "connection_errors", "timeouts"])
def test_errors_under_load_are_wrong_answers(error: str) -> None:
    """wrk counts answers with an error status as responses; here they are none."""
    counts = {"responses": 9, "seconds": 1.0, "status_errors": 0, "connection_errors": 0, "timeouts": 0}
    assert read_output("Running 1s test\n" + json.dumps(counts)).responses == 9
    with pytest.raises(WrongAnswer):
        read_output(json.dumps({**counts, error: 1}))


def test_of_a_number_of_requests_all_must_be_answered() -> None:
    """A connection that was closed when it had nothing to do does not matter."""
    counts = {"responses": 9, "seconds": 1.0, "status_errors": 0, "connection_errors": 3, "timeouts": 0}
    assert read_output(json.dumps(counts), 9).responses == 9
    with pytest.raises(WrongAnswer, match="9 answers of 10"):
        read_output(json.dumps(counts), 10)


# ── settings and report ──────────────────────────────────────────────────────────────────────────────────


def test_the_gateway_is_measured_with_settings_that_it_knows() -> None:
    """A setting that was renamed is found here, and not in the middle of a benchmark."""
    setting = Setting(Path("."), "http://127.0.0.1:1", 2, 3, "key")
    assert Settings.model_validate(gateway_settings(setting)).logging.level == "info"


def test_the_report_has_goals_figures_and_who_is_missing() -> None:
    """As Markdown for readers, as JSON with every round."""
    machine = Machine(2, "a CPU", 8, "Linux", "CPython", "abc")
    names = [contender.name for contender in CONTENDERS[:2]]
    told = dict.fromkeys(names, "1.0")
    result = Result(machine, "pinned", "2026-01-01", "", told, told, ["litellm: absent"], 0.1, [1.0], ROUNDS)
    text = result.as_markdown()
    assert "| CPU per plain request, µs | 200 (90 to 500) | 70 (1 to 100) |" in text
    assert "| CPU per plain request | vllm-router | 1.70 × | 1.30 × | – | not measured |" in text
    assert "* litellm: absent" in text
    read = json.loads(result.as_json())
    assert [each.get("nginx", {}).get("plain_cpu_us") for each in read["rounds"]] == [50, 100, 90, None, 1]
    assert read["medians"]["nginx"]["plain_cpu_us"] == {"median": 70, "low": 1, "high": 100}
