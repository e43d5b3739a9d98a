"""Tokens → the bytes vLLM would send, for chat and for completions, streamed and whole.

A stream is mostly one chunk per token, so all of a chunk but its token is built once per answer and a token
costs the joining of three byte strings. The answer's text is a round of words of 4 bytes each, so its length
in bytes is 4 × its tokens, as the mock counts prompts too.
"""

import time
import uuid
from dataclasses import dataclass

import msgspec

from .openai_requests import Generation

FINGERPRINT = "mock-gpu"
DONE = b"data: [DONE]\n\n"

_WORDS = b" the sun and sea are old but new day has one way out for all who see far off low ice"
_TOKENS = [_WORDS[i : i + 4] for i in range(0, len(_WORDS), 4)]
_FINGERPRINT_FIELD = f',"system_fingerprint":"{FINGERPRINT}"'.encode()
_END = b"}\n\n"


def token_text(index: int) -> bytes:
    """The `index`-th token of every answer: 4 ASCII bytes that need no escaping in JSON."""
    return _TOKENS[index % len(_TOKENS)]


def answer_text(tokens: int) -> str:
    rounds = -(-tokens // len(_TOKENS))
    return (b"".join(_TOKENS) * rounds)[: 4 * tokens].decode()


@dataclass(frozen=True)
class AnswerForm:
    """What differs between the two endpoints."""

    id_prefix: str
    object: str
    chunk_object: str
    chunk_open: str
    """Between the choice's index and its text."""
    chunk_close: str
    chunk_close_last: str
    role_chunk_close: str | None
    """The first chunk of a choice, which carries no token; None: there is none."""


CHAT = AnswerForm(
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    chunk_open='"delta":{"content":"',
    chunk_close='"},"logprobs":null,"finish_reason":null,"token_ids":null}]',
    chunk_close_last='"},"logprobs":null,"finish_reason":"%s","stop_reason":null,"token_ids":null}]',
    role_chunk_close='"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]',
)
COMPLETION = AnswerForm(
    id_prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
    chunk_open='"text":"',
    chunk_close='","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]',
    chunk_close_last=(
        '","logprobs":null,"finish_reason":"%s","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]'
    ),
    role_chunk_close=None,
)


class StreamedAnswer:
    """The events of one streamed answer, each as the bytes of one write."""

    def __init__(self, form: AnswerForm, asked: Generation, model: str, request_id: str) -> None:
        self._asked = asked
        self._prompt_tokens = asked.choices_prompt_tokens()
        fields = _common_fields(form.chunk_object, form.id_prefix + request_id, model)
        self._head = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
        starts = [self._head + b'{"index":%d,' % choice for choice in range(len(self._prompt_tokens))]
        self._opens = [start + form.chunk_open.encode() for start in starts]
        self._close = form.chunk_close.encode()
        self._close_last = (form.chunk_close_last % asked.finish_reason).encode()
        if not asked.include_usage:
            self._close_last += _FINGERPRINT_FIELD
        self._role_close = None if form.role_chunk_close is None else form.role_chunk_close.encode()
        self._starts = starts

    def events_at_once(self) -> list[bytes]:
        return []

    def events_with_first_token(self) -> list[bytes]:
        if self._role_close is None:
            return []
        tail = b',"prompt_token_ids":null,"prompt_text":null' + _END
        return [
            start + self._role_close + self._running_usage(choice, 0) + tail
            for choice, start in enumerate(self._starts)
        ]

    def token_event(self, choice: int, index: int, finished: bool) -> bytes:
        close = self._close_last if finished else self._close
        if self._asked.continuous_usage:
            close += self._running_usage(choice, index + 1)
        return self._opens[choice] + token_text(index) + close + _END

    def closing_events(self) -> list[bytes]:
        if not self._asked.include_usage:
            return [DONE]
        usage = b'],"usage":' + msgspec.json.encode(_usage(self._asked))
        return [self._head + usage + _FINGERPRINT_FIELD + _END, DONE]

    def _running_usage(self, choice: int, tokens: int) -> bytes:
        if not self._asked.continuous_usage:
            return b""
        prompt = self._prompt_tokens[choice]
        return (
            b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"completion_tokens_details":null}' % (prompt, prompt + tokens, tokens)
        )


def whole_answer(form: AnswerForm, asked: Generation, model: str, request_id: str) -> bytes:
    text = answer_text(asked.output_tokens)
    choices = [_choice(form, choice, text, asked) for choice in range(len(asked.choices_prompt_tokens()))]
    answer = _common_fields(form.object, form.id_prefix + request_id, model) | {
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": _usage(asked) | {"completion_tokens_details": None},
        "kv_transfer_params": None,
    }
    return msgspec.json.encode(answer)


def new_request_id() -> str:
    return uuid.uuid4().hex[:16]


def _common_fields(object: str, id: str, model: str) -> dict[str, object]:
    return {"id": id, "object": object, "created": int(time.time()), "model": model}


def _choice(form: AnswerForm, index: int, text: str, asked: Generation) -> dict[str, object]:
    answer: dict[str, object] = {"index": index}
    if form is CHAT:
        answer["message"] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
    else:
        answer["text"] = text
    return answer | {
        "logprobs": None,
        "finish_reason": asked.finish_reason,
        "stop_reason": None,
        "token_ids": None,
    }


def _usage(asked: Generation) -> dict[str, object]:
    prompt = sum(asked.prompts_tokens)
    completion = asked.output_tokens * asked.n * len(asked.prompts_tokens)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
