"""Vectors, scores and probabilities that mean little and are always the same, in vLLM's forms.

A text's vector is the sum of its words' vectors, scaled to length 1; a word's vector is a hash of it. A
score is the part of the words of both texts that they share. So texts with more words in common are closer,
by either measure. Only the first words of a text are looked at: an answer must cost the mock no time.
"""

import base64
import hashlib
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from .pooling_requests import InputsCall, PairsCall, PoolingCall, parse_inputs, parse_rerank, parse_score

DIMENSIONS = 8
_CHARACTERS_READ = 512
_IDS_READ = 64
_HASH = struct.Struct(f"<{DIMENSIONS}h")

C = TypeVar("C", bound=PoolingCall)


def embeddings_answer(call: InputsCall, model: str, request_id: str) -> bytes:
    data = [
        {"index": index, "object": "embedding", "embedding": _vector_as_asked(text, call)}
        for index, text in enumerate(call.inputs)
    ]
    return _list_answer("embd-", data, call, model, request_id)


def pooling_answer(call: InputsCall, model: str, request_id: str) -> bytes:
    data = [
        {"index": index, "object": "pooling", "data": _vector_as_asked(text, call)}
        for index, text in enumerate(call.inputs)
    ]
    return _list_answer("pool-", data, call, model, request_id)


def classify_answer(call: InputsCall, model: str, request_id: str) -> bytes:
    data = []
    for index, text in enumerate(call.inputs):
        positive = round(0.5 + vector(text)[0] / 2, 6)
        label = "LABEL_1" if positive > 0.5 else "LABEL_0"
        probs = [round(1 - positive, 6), positive]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": 2})
    return _list_answer("classify-", data, call, model, request_id)


def score_answer(call: PairsCall, model: str, request_id: str) -> bytes:
    data = [
        {"index": index, "object": "score", "score": score(*pair)} for index, pair in enumerate(call.pairs)
    ]
    return _list_answer("score-", data, call, model, request_id)


def rerank_answer(call: PairsCall, model: str, request_id: str) -> bytes:
    """The best first, ties in the order they came."""
    results: list[dict[str, Any]] = [
        {
            "index": index,
            "document": {"text": document, "multi_modal": None},
            "relevance_score": score(query, document),
        }
        for index, (query, document) in enumerate(call.pairs)
    ]
    results.sort(key=lambda result: result["relevance_score"], reverse=True)
    used = sum(call.prompts_tokens)
    answer = {
        "id": f"rerank-{request_id}",
        "model": model,
        "usage": {"prompt_tokens": used, "total_tokens": used},
        "results": results[: call.top_n],
    }
    return msgspec.json.encode(answer)


def vector(text: str | list[int], dimensions: int | None = None) -> list[float]:
    """Of length 1. More dimensions than 8 repeat them, which changes no angle."""
    words = text[:_CHARACTERS_READ].split() if isinstance(text, str) else map(str, text[:_IDS_READ])
    sums = [0.0] * DIMENSIONS
    for word in words:
        for place, value in enumerate(_word_hash(word)):
            sums[place] += value
    if not any(sums):
        sums[0] = 1.0
    repeated = list(islice(cycle(sums), dimensions or DIMENSIONS))
    length = math.hypot(*repeated) or 1.0
    return [value / length for value in repeated]


def score(one: str, other: str) -> float:
    """Shared words / all words, 0 to 1."""
    words, others = _words(one), _words(other)
    return len(words & others) / max(1, len(words | others))


def _words(text: str) -> set[str]:
    return set(text[:_CHARACTERS_READ].lower().split())


def _word_hash(word: str) -> Sequence[int]:
    return _HASH.unpack(hashlib.blake2b(word.lower().encode(), digest_size=_HASH.size).digest())


def _vector_as_asked(text: str | list[int], call: InputsCall) -> list[float] | str:
    values = vector(text, call.dimensions)
    if call.as_base64:
        return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
    return values


def _list_answer(
    id_prefix: str, data: Sequence[Mapping[str, object]], call: PoolingCall, model: str, request_id: str
) -> bytes:
    used = sum(call.prompts_tokens)
    answer = {
        "id": id_prefix + request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": {
            "prompt_tokens": used,
            "total_tokens": used,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
    return msgspec.json.encode(answer)


class PoolingTask(NamedTuple, Generic[C]):
    """How an endpoint's bodies are read and its answers written; what is between them is the same for all."""

    parse: Callable[[bytes, str, int], C]
    answer: Callable[[C, str, str], bytes]


POOLING_TASKS: dict[str, PoolingTask[Any]] = {
    "/v1/embeddings": PoolingTask(parse_inputs, embeddings_answer),
    "/pooling": PoolingTask(parse_inputs, pooling_answer),
    "/classify": PoolingTask(parse_inputs, classify_answer),
    "/v1/score": PoolingTask(parse_score, score_answer),
    "/score": PoolingTask(parse_score, score_answer),
    "/v1/rerank": PoolingTask(parse_rerank, rerank_answer),
    "/rerank": PoolingTask(parse_rerank, rerank_answer),
}
