"""From a body to what the policy must know of it, without holding anybody up.

To read some megabytes takes longer than a token may, and so does tokenising some kilobytes: both are done
aside, in threads. One thread reads large bodies, one after another, for it needs Python's lock for most of
that time and several would take turns with everybody's streams. Tokenising needs no lock; it gets half of the
processors, in short jobs, so that a short prompt waits for one job of a long one and not for all of it.
"""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import ceil

from msgspec import structs

from gateway.api.body import BodyFacts
from gateway.api.body_text import TextCount
from gateway.api.endpoints import Endpoint
from gateway.api.request_facts import read_body, read_model
from gateway.api.tokenizer_files import BATCH_BYTES, TokenizerFile, batches
from gateway.policy.admission import Admission
from gateway.policy.input_estimator import TextFeatures

LARGE_BODY_BYTES = 256 * 1024
AT_ONCE_BYTES = 1024
"""Of text: so much is tokenised in the time it would take to hand it to a thread, or not much longer."""
LONG_AT_A_TIME = 2
LONG_WAITING_MAX = 4
"""A prompt of ten megabytes takes seconds. When so many wait for that, the next ones are estimated."""


class PromptReader:
    def __init__(self, admission: Admission, tokenizers: Mapping[str, TokenizerFile]) -> None:
        self._admission = admission
        self.tokenizers = tokenizers
        self._reading = ThreadPoolExecutor(1, "body-reader")
        self._tokenizing = ThreadPoolExecutor(max(1, _processors() // 2), "tokenizer")
        self._long = asyncio.Semaphore(LONG_AT_A_TIME)
        self._long_waiting = 0

    async def read(self, body: bytes, endpoint: Endpoint) -> BodyFacts:
        """What the body says. Raises Problem (400) naming the field that is wrong."""
        count = TextCount()
        if len(body) < LARGE_BODY_BYTES:
            facts = read_body(body, endpoint, count)
        else:
            loop = asyncio.get_running_loop()
            facts = await loop.run_in_executor(self._reading, read_body, body, endpoint, count)
        tokenizer = self.tokenizers.get(facts.model)
        return facts if tokenizer is None else await self._counted(facts, count, tokenizer)

    async def read_model(self, body: bytes) -> str | None:
        """The model that the body of a request for help names, if it names one. Raises Problem (400)."""
        if len(body) < LARGE_BODY_BYTES:
            return read_model(body)
        return await asyncio.get_running_loop().run_in_executor(self._reading, read_model, body)

    def close(self) -> None:
        for executor in (self._reading, self._tokenizing):
            executor.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ exact counts

    async def _counted(self, facts: BodyFacts, count: TextCount, tokenizer: TokenizerFile) -> BodyFacts:
        """The same facts with all text as a number of tokens; the template around it is left to estimate."""
        text_bytes = sum(map(len, count.texts))
        if text_bytes <= AT_ONCE_BYTES:
            tokens = sum(tokenizer.count(batch) for batch, _ in batches(count.texts))
        elif text_bytes <= BATCH_BYTES:
            tokens = await self._tokens(tokenizer, count.texts, text_bytes)
        elif self._long_waiting < LONG_WAITING_MAX:
            self._long_waiting += 1
            try:
                await self._long.acquire()
            finally:
                self._long_waiting -= 1
            try:
                tokens = await self._tokens(tokenizer, count.texts, text_bytes)
            finally:
                self._long.release()
        else:
            return facts
        template = TextFeatures(conversations=facts.text.conversations, items=facts.text.items)
        if tokens:
            tokens = tokens * facts.text_bytes // text_bytes  # more where a query is read with many texts
            text = facts.text._replace(conversations=0, items=0)
            self._admission.input_estimator.learn(facts.model, text, tokens)
        return structs.replace(facts, text=template, exact_tokens=facts.exact_tokens + tokens)

    async def _tokens(self, tokenizer: TokenizerFile, texts: list[bytes], text_bytes: int) -> int:
        """A prompt of more than `max_request_tokens` is refused anyway: its count is only begun."""
        loop = asyncio.get_running_loop()
        limit = self._admission.parameters.capacity.max_request_tokens
        tokens = done = 0
        for batch, size in batches(texts):
            tokens += await loop.run_in_executor(self._tokenizing, tokenizer.count, batch)
            done += size
            if limit is not None and tokens > limit:
                return ceil(tokens * text_bytes / done)
        return tokens


def _processors() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
