"""The engine of a soak run, a process of its own: `python -m tests.soak.engine PORT`.

It reads from each request's header how to treat it, and answers in the words of that API.
"""

import asyncio
import json
import sys
from typing import Any

import uvloop

from tests.soak.traffic import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    HUGE_EVENT_BYTES,
    PLAN_HEADER,
    RESPONSES,
    SLOW_BYTES,
    STALLED_BYTES,
    Plan,
)
from tests.support.scripted_engine import (
    DONE,
    END,
    FINISH,
    ROLE,
    Script,
    breaking_off,
    choice_event,
    event,
    plain,
    raw,
    scripted_engine,
)
from tests.support.scripted_upstream import STREAM_HEAD, RecordedRequest, ScriptedConnection, answer, chunk
from tests.support.typed_streams import (
    message_closing,
    message_delta_event,
    message_event,
    message_opening,
    response_closing,
    response_deltas,
    response_object,
    response_opening,
    response_usage,
)

JSON = ("content-type: application/json",)
LARGE_WORD = " x" * 32_768


class Events:
    """A stream of this plan's API: how it opens, one event for each word, how it ends."""

    def __init__(self, plan: Plan) -> None:
        self.opening, self.words, self.closing = _events(plan)


def _events(plan: Plan) -> tuple[list[bytes], list[bytes], list[bytes]]:
    words = plan.words
    if plan.path == CHAT:
        tokens = [choice_event({"content": word}) for word in words]
        return [ROLE], tokens, [FINISH, event({"id": "c", "choices": [], "usage": usage(plan)}), DONE]
    if plan.path == COMPLETIONS:
        tokens = [event({"id": "c", "choices": [{"index": 0, "text": word}]}) for word in words]
        last = event({"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        return [], tokens, [last, event({"id": "c", "choices": [], "usage": usage(plan)}), DONE]
    if plan.path == RESPONSES:
        told = response_usage(plan.prompt, plan.completion, plan.cached)
        return response_opening(), response_deltas(words), response_closing(words, told)
    told = usage(plan)
    opening = message_opening(
        input_tokens=told["input_tokens"],
        cache_read_input_tokens=told["cache_read_input_tokens"],
        output_tokens=0,
    )
    closing = message_closing(output_tokens=plan.completion)
    return opening, [message_delta_event(word) for word in words], closing


def usage(plan: Plan) -> dict[str, Any]:
    if plan.path == RESPONSES:
        return response_usage(plan.prompt, plan.completion, plan.cached)
    if plan.path in (CHAT, COMPLETIONS, EMBEDDINGS):
        return {
            "prompt_tokens": plan.prompt,
            "completion_tokens": plan.completion,
            "total_tokens": plan.prompt + plan.completion,
            "prompt_tokens_details": {"cached_tokens": plan.cached},
        }
    return {  # Anthropic's input is what did not come from the cache
        "input_tokens": plan.prompt - plan.cached,
        "cache_read_input_tokens": plan.cached,
        "output_tokens": plan.completion,
    }


def whole_body(plan: Plan) -> bytes:
    """A plain answer; its text is the plan's words."""
    text, told = "".join(plan.words), usage(plan)
    if plan.path == RESPONSES:
        body = response_object("completed", told, output_text=text)
    elif plan.path == EMBEDDINGS:
        body = {"object": "list", "id": plan.id, "data": [{"index": 0, "embedding": [0.25] * 16}]}
    elif plan.path == CHAT:
        message = {"role": "assistant", "content": text}
        body = {"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    elif plan.path == COMPLETIONS:
        body = {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    else:
        body = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
        }
    return json.dumps(body | {"usage": told}).encode()


def failing(status: str) -> Script:
    return plain(b'{"error":{"message":"on purpose","type":"server_error"}}', status=status)


class Play:
    def __init__(self) -> None:
        self._full_before: set[str] = set()

    async def __call__(self, connection: ScriptedConnection, request: RecordedRequest) -> None:
        plan = Plan.read(request.header(PLAN_HEADER) or "")
        await self._script(plan)(connection, request)

    def _script(self, plan: Plan) -> Script:
        match plan.kind:
            case "reset before the head" | "reset behind the head" | "reset in the stream":
                return _resetting(plan)
            case "silent before the head" | "silent in the stream":
                return _silent(plan)
            case "error 500":
                return failing("500 Internal Server Error")
            case "full":
                return failing("503 Service Unavailable")
            case "full once" if plan.id not in self._full_before:
                self._full_before.add(plan.id)
                return failing("503 Service Unavailable")
            case "error event":
                events = Events(plan)
                told = event({"error": {"message": "on purpose", "type": "server_error"}})
                error = told if plan.path in (CHAT, COMPLETIONS) else _typed_error(plan)
                return _streaming(plan, [*events.opening, *events.words, error])
            case "less than it says":
                body = whole_body(plan)
                head = answer(body + b" " * 1000, headers=JSON)[: -len(body) - 1000]
                return raw(head + body, close=True)
            case "more than it says":
                return raw(answer(whole_body(plan), headers=JSON) + b"HTTP/1.1 200 OK\r\njunk")
            case "no JSON":
                return plain(b"<html>sorry</html>")
            case "huge event":
                return _streaming(plan, _with_large_words(plan, HUGE_EVENT_BYTES, HUGE_EVENT_BYTES))
            case "reads slowly":
                return _streaming(plan, _with_large_words(plan, SLOW_BYTES, len(LARGE_WORD)))
            case "reads nothing":
                return _streaming(plan, _with_large_words(plan, STALLED_BYTES, len(LARGE_WORD)))
            case _:
                return _answering(plan)


def _answering(plan: Plan) -> Script:
    if plan.stream:
        events = Events(plan)
        return _streaming(plan, [*events.opening, *events.words, *events.closing])

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await asyncio.sleep(plan.pause_ms * plan.completion / 1000)
        await plain(whole_body(plan))(connection, request)

    return script


def _streaming(plan: Plan, events: list[bytes]) -> Script:
    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(STREAM_HEAD)
        if plan.pause_ms:
            for each in events:
                await connection.send(chunk(each))
                await asyncio.sleep(plan.pause_ms / 1000)
        else:
            for each in events:
                await connection.send(chunk(each))
        await connection.send(END)

    return script


def _with_large_words(plan: Plan, total: int, each: int) -> list[bytes]:
    """The stream with so many bytes of text, in pieces of that size, behind its first word."""
    events = Events(plan)
    first, *rest = events.words
    large = LARGE_WORD * (each // len(LARGE_WORD))
    piece = rest[-1].replace(plan.words[-1].encode(), large.encode(), 1)
    return [*events.opening, first, *[piece] * (total // each), *events.closing]


def _typed_error(plan: Plan) -> bytes:
    if plan.path == RESPONSES:
        return message_event("error", code="server_error", message="on purpose", param=None)
    return message_event("error", error={"type": "overloaded_error", "message": "on purpose"})


def _resetting(plan: Plan) -> Script:
    if plan.kind == "reset in the stream":
        events = Events(plan)
        return breaking_off(*events.opening, *events.words)
    if plan.kind == "reset behind the head" and plan.stream:
        return breaking_off()
    body = whole_body(plan)
    begun = answer(body, headers=JSON)[: -len(body) // 2] if plan.kind == "reset behind the head" else b""

    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        await connection.send(begun)
        connection.reset()

    return script


def _silent(plan: Plan) -> Script:
    async def script(connection: ScriptedConnection, request: RecordedRequest) -> None:
        if plan.kind == "silent in the stream":
            events = Events(plan)
            await connection.send(STREAM_HEAD + b"".join(map(chunk, [*events.opening, *events.words])))
        await connection.peer_closed.wait()
        connection.close()

    return script


async def main(port: int) -> None:
    async with scripted_engine(port) as engine:
        engine.play = Play()
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
