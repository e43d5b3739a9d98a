"""Bodies become facts; where a model has a tokenizer its text is counted, aside when that takes long."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.api import prompt_reader
from gateway.api.body import BodyFacts
from gateway.api.endpoints import ENDPOINTS
from gateway.api.prompt_reader import LONG_AT_A_TIME, LONG_WAITING_MAX, PromptReader
from gateway.api.tokenizer_files import BATCH_BYTES, TokenizerFile
from gateway.policy.admission import Admission
from gateway.policy.clock import ManualClock
from gateway.policy.input_estimator import TextFeatures
from tests.support.policy_settings import policy, upstream
from tests.support.sample_texts import trained_tokenizer, unseen_half, write_tokenizer

pytestmark = pytest.mark.anyio

CHAT = ENDPOINTS["/v1/chat/completions"]
RERANK = ENDPOINTS["/v1/rerank"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


class WatchedTokenizer(TokenizerFile):
    """Tells which threads worked, and works only while it is let."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.threads: set[str] = set()
        self.batches = 0
        self.go = threading.Event()
        self.go.set()

    def count(self, batch: list[str]) -> int:
        assert self.go.wait(30)
        self.threads.add(threading.current_thread().name)
        self.batches += 1
        return super().count(batch)


class Bench:
    def __init__(self, path: Path, **capacity: Any) -> None:
        self.tokenizer = WatchedTokenizer(path)
        self.admission = Admission(policy(upstream(), capacity=capacity), ManualClock())
        self.reader = PromptReader(self.admission, {"counted": self.tokenizer})

    async def read(self, text: str, model: str = "counted") -> BodyFacts:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        return await self.reader.read(json.dumps(body).encode(), CHAT)


@pytest.fixture
def bench(path: Path) -> Iterator[Bench]:
    made = Bench(path)
    yield made
    made.tokenizer.go.set()
    made.reader.close()


def exactly(text: str) -> int:
    return len(trained_tokenizer().encode(text))


@pytest.mark.parametrize("size", [10, 900, 20_000, 300_000])
async def test_text_is_counted_exactly_whatever_its_length(bench: Bench, size: int) -> None:
    """What is left to estimate is the chat template around it."""
    text = unseen_half("prose")[:1000] * (size // 1000) if size >= 1000 else unseen_half("prose")[:size]
    facts = await bench.read(text)
    assert facts.exact_tokens == pytest.approx(exactly(text), abs=size // BATCH_BYTES)
    assert facts.text == TextFeatures(conversations=1, items=1)
    assert facts.text_bytes == len(text.encode())


async def test_other_models_are_not_counted(bench: Bench) -> None:
    """Their text stays to be estimated."""
    facts = await bench.read("Good day, everybody.", model="other")
    assert facts.exact_tokens == 0
    assert facts.text.text_bytes == len("Good day, everybody.")
    assert bench.tokenizer.batches == 0


async def test_token_ids_and_text_add_up(bench: Bench) -> None:
    """Ids are counted as they are, beside the text of the same body."""
    body = {"model": "counted", "prompt": [[1, 2, 3], [4]], "suffix": "the end"}
    facts = await bench.reader.read(json.dumps(body).encode(), ENDPOINTS["/v1/completions"])
    assert facts.exact_tokens == 4 + exactly("the end")


async def test_a_query_is_counted_with_each_document(bench: Bench) -> None:
    """As often as the engine reads it, in proportion."""
    text = unseen_half("prose")[:400]
    body = {"model": "counted", "query": text, "documents": [text] * 9}
    facts = await bench.reader.read(json.dumps(body).encode(), RERANK)
    assert facts.exact_tokens == pytest.approx(18 * exactly(text), rel=0.01)


async def test_only_small_text_is_counted_on_the_loop(bench: Bench) -> None:
    """A kilobyte; more goes to a thread."""
    here = threading.current_thread().name
    await bench.read("x " * 400)
    assert bench.tokenizer.threads == {here}
    await bench.read("x " * 4000)
    assert bench.tokenizer.threads > {here}


async def test_counting_ends_where_a_prompt_is_too_long_anyway(path: Path) -> None:
    """The rest is what the beginning makes likely."""
    bench = Bench(path, max_request_tokens=1000)
    text = unseen_half("code")[:1_000_000]
    facts = await bench.read(text)
    assert bench.tokenizer.batches < 5
    assert facts.exact_tokens == pytest.approx(exactly(text), rel=0.3)
    bench.reader.close()


async def test_exact_counts_teach_the_estimate(bench: Bench) -> None:
    """So that a prompt which is not counted, for want of time, is estimated well."""
    for start in range(0, 100_000, 2000):
        await bench.read(unseen_half("prose")[start : start + 2000])
    text = unseen_half("prose")[100_000:110_000]
    estimated = bench.admission.input_estimator.estimate("counted", (await bench.read(text, "o")).text)
    assert estimated == pytest.approx(exactly(text), rel=0.15)


async def test_a_short_prompt_passes_the_long_ones(bench: Bench) -> None:
    """It waits for a piece of one, not for all of it; and only a few are at work at a time."""
    long = unseen_half("prose")[:100_000] * 3
    pieces = len(long) // BATCH_BYTES
    waiting = [asyncio.ensure_future(bench.read(long)) for _ in range(LONG_AT_A_TIME + LONG_WAITING_MAX)]
    await asyncio.sleep(0)
    await bench.read(long[:5000])
    assert bench.tokenizer.batches < LONG_AT_A_TIME * pieces
    for facts in await asyncio.gather(*waiting):
        assert facts.exact_tokens == pytest.approx(exactly(long), rel=0.01)


async def test_long_prompts_beyond_the_queue_are_estimated(bench: Bench) -> None:
    """Rather than piling up, with all that they hold in memory."""
    long = unseen_half("prose")[:100_000]
    bench.tokenizer.go.clear()
    waiting = [asyncio.ensure_future(bench.read(long)) for _ in range(LONG_AT_A_TIME + LONG_WAITING_MAX)]
    await asyncio.sleep(0)
    facts = await bench.read(long)
    assert facts.exact_tokens == 0
    assert facts.text.text_bytes == len(long.encode())
    waiting[-1].cancel()
    waiting[0].cancel()
    await asyncio.sleep(0)
    bench.tokenizer.go.set()
    done = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(each, asyncio.CancelledError) for each in done) == 2
    assert (await bench.read(long)).exact_tokens > 0  # the places of those who left are free again


async def test_a_large_body_is_read_aside(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one thread for all of them."""
    threads = set()
    read_body = prompt_reader.read_body

    def watched(*given: Any) -> BodyFacts:
        threads.add(threading.current_thread())
        return read_body(*given)

    monkeypatch.setattr(prompt_reader, "read_body", watched)
    await asyncio.gather(*(bench.read("word " * 60_000, "other") for _ in range(4)))
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    await bench.read("word", "other")
    assert threading.current_thread() in threads
