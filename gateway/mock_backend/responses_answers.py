"""Tokens → the bytes vLLM would send for `/v1/responses`, streamed and whole.

The events have names and running numbers; the first two come before the prompt has been read, usage comes
with the last, and there is no `[DONE]`. An answer cut by its limit has the status `incomplete`, but its last
event is called `response.completed` all the same.
"""

import time
from typing import Any

import msgspec

from .openai_answers import answer_text, new_request_id, token_text
from .openai_requests import Generation

_EVENTS_BEFORE_TOKENS = 4
_Members = dict[str, Any]


class StreamedResponse:
    """The events of one streamed answer, each as the bytes of one write."""

    def __init__(self, asked: Generation, model: str, request_id: str) -> None:
        self._asked = asked
        self._item_id = _item_id()
        self._begun = _response(asked, model) | {"status": "in_progress", "output": [], "usage": None}
        self._delta_open = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'
        self._delta_middle = (
            f'","item_id":"{self._item_id}","logprobs":[],"output_index":0,"sequence_number":'.encode()
        )
        self._delta_close = b',"type":"response.output_text.delta"}\n\n'

    def events_at_once(self) -> list[bytes]:
        return [
            _event("response.created", 0, {"response": self._begun}),
            _event("response.in_progress", 1, {"response": self._begun}),
        ]

    def events_with_first_token(self) -> list[bytes]:
        item = _item(self._item_id, [], "in_progress")
        return [
            _event("response.output_item.added", 2, {"item": item, "output_index": 0}),
            _event("response.content_part.added", 3, self._place() | {"part": _part("", [])}),
        ]

    def token_event(self, choice: int, index: int, finished: bool) -> bytes:
        number = b"%d" % (_EVENTS_BEFORE_TOKENS + index)
        return self._delta_open + token_text(index) + self._delta_middle + number + self._delta_close

    def closing_events(self) -> list[bytes]:
        number = _EVENTS_BEFORE_TOKENS + self._asked.output_tokens
        text = answer_text(self._asked.output_tokens)
        item = _item(self._item_id, [_part(text, None)], "completed")
        whole = self._begun | _ending(self._asked) | {"output": [item], "usage": _usage(self._asked)}
        return [
            _event("response.output_text.done", number, self._place() | {"logprobs": [], "text": text}),
            _event("response.content_part.done", number + 1, self._place() | {"part": _part(text, None)}),
            _event("response.output_item.done", number + 2, {"item": item, "output_index": 0}),
            _event("response.completed", number + 3, {"response": whole}),
        ]

    def _place(self) -> _Members:
        return {"content_index": 0, "item_id": self._item_id, "output_index": 0}


def whole_response(asked: Generation, model: str, request_id: str) -> bytes:
    item = _item(_item_id(), [_part(answer_text(asked.output_tokens), None)], "completed")
    answer = _response(asked, model) | _ending(asked) | {"output": [item], "usage": _usage(asked)}
    return msgspec.json.encode(answer)


def _event(kind: str, number: int, members: _Members) -> bytes:
    """The members in the order of their names, as vLLM has them."""
    data = dict(sorted((members | {"sequence_number": number, "type": kind}).items()))
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


def _item_id() -> str:
    return "msg_" + new_request_id()


def _item(id: str, content: list[_Members], status: str) -> _Members:
    return {
        "id": id,
        "content": content,
        "role": "assistant",
        "status": status,
        "type": "message",
        "phase": None,
    }


def _part(text: str, logprobs: list[object] | None) -> _Members:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _ending(asked: Generation) -> _Members:
    if asked.finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed", "incomplete_details": None}


def _usage(asked: Generation) -> _Members:
    prompt = sum(asked.prompts_tokens)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": 0,
            "cache_write_tokens": 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": asked.output_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": prompt + asked.output_tokens,
    }


def _response(asked: Generation, model: str) -> _Members:
    """All members in vLLM's order; most say what was not asked for."""
    return {
        "id": "resp_" + new_request_id(),
        "created_at": int(time.time()),
        "incomplete_details": None,
        "instructions": None,
        "metadata": None,
        "model": model,
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "none",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": asked.output_tokens if asked.finish_reason == "length" else None,
        "max_tool_calls": None,
        "previous_response_id": None,
        "prompt": None,
        "reasoning": None,
        "service_tier": "auto",
        "status": "in_progress",
        "text": None,
        "top_logprobs": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "input_messages": None,
        "output_messages": None,
    }
