"""Tokens → the bytes vLLM would send for Anthropic's `/v1/messages`, streamed and whole.

The events have names, usage comes with the first and with the last but one, and there is no `[DONE]`.
"""

import msgspec

from .openai_answers import answer_text, token_text
from .openai_requests import Generation

_STOP_REASONS = {"length": "max_tokens", "stop": "end_turn"}
_DELTA_OPEN = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"'
)
_DELTA_CLOSE = b'"},"index":0}\n\n'


class StreamedMessage:
    """The events of one streamed answer, each as the bytes of one write."""

    def __init__(self, asked: Generation, model: str, request_id: str) -> None:
        self._asked = asked
        self._message = _message(model, request_id, [])

    def events_at_once(self) -> list[bytes]:
        return []

    def events_with_first_token(self) -> list[bytes]:
        unknown = {"stop_reason": None, "stop_sequence": None, "usage": _usage(self._asked, 0)}
        return [
            _event("message_start", message=self._message | unknown),
            _event("content_block_start", content_block={"type": "text", "text": ""}, index=0),
        ]

    def token_event(self, choice: int, index: int, finished: bool) -> bytes:
        return _DELTA_OPEN + token_text(index) + _DELTA_CLOSE

    def closing_events(self) -> list[bytes]:
        reason = {"stop_reason": _STOP_REASONS[self._asked.finish_reason], "stop_sequence": None}
        usage = _usage(self._asked, self._asked.output_tokens)
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta=reason, usage=usage),
            _event("message_stop"),
        ]


def whole_message(asked: Generation, model: str, request_id: str) -> bytes:
    content = [{"type": "text", "text": answer_text(asked.output_tokens)}]
    answer = _message(model, request_id, content) | {
        "stop_reason": _STOP_REASONS[asked.finish_reason],
        "usage": _usage(asked, asked.output_tokens),
    }
    return msgspec.json.encode(answer)


def _event(kind: str, **members: object) -> bytes:
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **members}) + b"\n\n"


def _message(model: str, request_id: str, content: list[dict[str, str]]) -> dict[str, object]:
    return {
        "id": "chatcmpl-" + request_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
    }


def _usage(asked: Generation, output_tokens: int) -> dict[str, int]:
    return {"input_tokens": sum(asked.prompts_tokens), "output_tokens": output_tokens}
