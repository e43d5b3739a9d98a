"""The GPU model behind vLLM's OpenAI-compatible face: a plain ASGI application.

Headers of a stream go out when its sequences are queued; each token is one write at the end of its iteration.
A client that goes away aborts its sequences at once. Every sequence a call has queued is given back in one
place, `_sequences`, on every way out.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from .asgi import (
    EVENT_STREAM,
    Message,
    Receive,
    Send,
    client_gone,
    read_body,
    respond,
    response_body,
    response_start,
)
from .generation_tasks import GENERATION_TASKS, GenerationTask
from .gpu_model import GpuEngine, GpuPreset, SchedulingPolicy
from .metrics_page import CONTENT_TYPE, metrics_page
from .openai_answers import new_request_id
from .openai_requests import Generation
from .paced_engine import PacedEngine
from .pooling_answers import POOLING_TASKS, PoolingTask
from .request_errors import RequestError, queue_full
from .token_calls import TOKEN_CALLS

MODEL = "mock-gpu"
VERSION = "0.32.0"
"""The vLLM whose wire format this is."""

_log = logging.getLogger(__name__)

AnswerAtOnce = Callable[[bytes, str, int], bytes]


@dataclass(frozen=True)
class Work:
    """What a call has the engine do: a sequence for each prompt, all alike but for the prompt's length."""

    prompts_tokens: Sequence[int]
    output_tokens: int = 0
    priority: int = 0
    finish_reason: str = "stop"


class TokenMailbox:
    """Tokens on their way from the engine to one answer. One reader."""

    def __init__(self) -> None:
        self._tokens: list[tuple[int, int, bool]] = []
        self._closed = False
        self._news = asyncio.Event()

    def put(self, choice: int, index: int, finished: bool) -> None:
        self._tokens.append((choice, index, finished))
        self._news.set()

    def put_last(self, choice: int, index: int, finished: bool) -> None:
        """For answers that are sent whole: wakes the reader for the last token only."""
        if finished:
            self.put(choice, index, finished)

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def take(self) -> list[tuple[int, int, bool]]:
        """What has come since the last time, waiting for something to come; empty once closed."""
        while not self._tokens and not self._closed:
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return [] if self._closed else tokens


class MockGpuApp:
    """One engine and its HTTP face; the lifespan protocol starts and stops the engine."""

    def __init__(
        self,
        preset: GpuPreset,
        policy: SchedulingPolicy = "fcfs",
        max_num_seqs: int | None = None,
        model: str = MODEL,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        self._model = model
        self._created = int(time.time())
        self._max_model_len = preset.max_model_len
        self._paced = PacedEngine(
            GpuEngine(preset, policy, max_num_seqs), max_num_queued_reqs=max_num_queued_reqs
        )
        self._running: asyncio.Task[None] | None = None
        self._routes: dict[str, tuple[str, Callable[[Message, Receive, Send], Awaitable[None]]]] = {
            **{path: ("POST", partial(self._generate, task)) for path, task in GENERATION_TASKS.items()},
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/version": ("GET", self._version),
            "/metrics": ("GET", self._metrics),
            **{path: ("POST", partial(self._pool, task)) for path, task in POOLING_TASKS.items()},
            **{path: ("POST", partial(self._at_once, answer)) for path, answer in TOKEN_CALLS.items()},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        method, handler = self._routes.get(scope["path"], ("", None))
        if handler is None:
            await respond(send, 404, b'{"detail":"Not Found"}')
        elif scope["method"] != method:
            await respond(send, 405, b'{"detail":"Method Not Allowed"}', [(b"allow", method.encode())])
        else:
            try:
                await handler(scope, receive, send)
            except RequestError as error:
                await respond(send, error.status, error.body(scope["path"]))

    def refuse_for_want_of_room(self) -> RequestError:
        """As if the queue were full, and counted like that."""
        self._paced.counters.queue_full += 1
        return queue_full()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._running = asyncio.create_task(self._paced.run())
        self._running.add_done_callback(_report_failure)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._running.cancel()
        await asyncio.wait([self._running])
        await send({"type": "lifespan.shutdown.complete"})

    async def _health(self, scope: Message, receive: Receive, send: Send) -> None:
        alive = self._running is not None and not self._running.done()
        await respond(send, 200 if alive else 503, b"", content_type=None)

    async def _version(self, scope: Message, receive: Receive, send: Send) -> None:
        await respond(send, 200, msgspec.json.encode({"version": VERSION}))

    async def _metrics(self, scope: Message, receive: Receive, send: Send) -> None:
        page = metrics_page(self._paced.engine, self._paced.counters, self._model)
        await respond(send, 200, page, content_type=CONTENT_TYPE)

    async def _models(self, scope: Message, receive: Receive, send: Send) -> None:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "max_model_len": self._max_model_len,
        }
        await respond(send, 200, msgspec.json.encode({"object": "list", "data": [card]}))

    async def _generate(self, task: GenerationTask, scope: Message, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        asked = task.parse(body, self._model, self._max_model_len)
        work = Work(asked.choices_prompt_tokens(), asked.output_tokens, asked.priority, asked.finish_reason)
        answer = _stream_answer if asked.stream else _send_whole_answer
        async with self._sequences(work, receive, every_token=asked.stream) as mailbox:
            await answer(task, asked, self._model, _request_id(scope), mailbox, send)

    async def _pool(self, task: PoolingTask[Any], scope: Message, receive: Receive, send: Send) -> None:
        """Embeddings, scores and their like: nothing but prefill."""
        body = await read_body(receive)
        if body is None:
            return
        call = task.parse(body, self._model, self._max_model_len)
        work = Work(call.prompts_tokens, priority=call.priority)
        async with self._sequences(work, receive, every_token=False) as mailbox:
            if await _all_finished(mailbox, len(work.prompts_tokens)):
                request_id = _request_id(scope)
                answer = task.answer(call, self._model, request_id)
                await respond(send, 200, answer, [(b"x-request-id", request_id.encode())])

    async def _at_once(self, answer: AnswerAtOnce, scope: Message, receive: Receive, send: Send) -> None:
        """Questions that need no GPU."""
        body = await read_body(receive)
        if body is not None:
            await respond(send, 200, answer(body, self._model, self._max_model_len))

    @asynccontextmanager
    async def _sequences(
        self, work: Work, receive: Receive, *, every_token: bool
    ) -> AsyncIterator[TokenMailbox]:
        """The work, queued; its tokens, or only the last of each sequence, come into the mailbox. When the
        client has gone the mailbox closes. Raises RequestError when the engine takes no more."""
        if not self._paced.takes(len(work.prompts_tokens)):
            raise queue_full()
        mailbox = TokenMailbox()
        put = mailbox.put if every_token else mailbox.put_last
        gone = asyncio.create_task(client_gone(receive))
        gone.add_done_callback(lambda _: mailbox.close())
        ids = [
            self._paced.submit(
                tokens, work.output_tokens, work.priority, work.finish_reason, partial(put, index)
            )
            for index, tokens in enumerate(work.prompts_tokens)
        ]
        try:
            yield mailbox
        finally:
            gone.cancel()
            for id in ids:
                self._paced.abort(id)


async def _stream_answer(
    task: GenerationTask, asked: Generation, model: str, request_id: str, mailbox: TokenMailbox, send: Send
) -> None:
    answer = task.stream(asked, model, request_id)
    await send(response_start(200, [(b"content-type", EVENT_STREAM), (b"x-request-id", request_id.encode())]))
    for event in answer.events_at_once():
        await send(response_body(event))
    unfinished = len(asked.choices_prompt_tokens())
    opening = answer.events_with_first_token()
    while unfinished:
        tokens = await mailbox.take()
        if not tokens:
            return
        for event in opening:
            await send(response_body(event))
        opening = []
        for choice, index, finished in tokens:
            await send(response_body(answer.token_event(choice, index, finished), tokens=1))
            unfinished -= finished
    for event in answer.closing_events():
        await send(response_body(event))
    await send(response_body(b"", more=False))


async def _send_whole_answer(
    task: GenerationTask, asked: Generation, model: str, request_id: str, mailbox: TokenMailbox, send: Send
) -> None:
    if await _all_finished(mailbox, len(asked.choices_prompt_tokens())):
        body = task.whole(asked, model, request_id)
        await respond(send, 200, body, [(b"x-request-id", request_id.encode())])


async def _all_finished(mailbox: TokenMailbox, sequences: int) -> bool:
    """Wait for the last token of each; False when the client has gone before."""
    while sequences:
        tokens = await mailbox.take()
        if not tokens:
            return False
        sequences -= len(tokens)
    return True


def _request_id(scope: Message) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            return str(value, "latin-1")
    return new_request_id()


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.critical("the engine has died", exc_info=error)
