"""Calls that generate nothing → the prompts to work on, or the error vLLM would answer.

Embeddings, pooling and classification work on each input by itself; scores and rankings on pairs, where one
prompt is a query with a document behind it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from .openai_requests import Message, Prompts, separate_prompts, text_of_content, tokens_of_prompt
from .request_errors import check_model, decoded, prompt_too_long, refused
from .tokens import count_tokens, text_bytes

DIMENSIONS_MAX = 4096


@dataclass(frozen=True)
class PoolingCall:
    """`prompts_tokens` is the work, one sequence each; the rest is what the answer is made of."""

    prompts_tokens: tuple[int, ...]
    priority: int


@dataclass(frozen=True)
class InputsCall(PoolingCall):
    inputs: tuple[str | list[int], ...]
    dimensions: int | None = None
    as_base64: bool = False


@dataclass(frozen=True)
class PairsCall(PoolingCall):
    pairs: tuple[tuple[str, str], ...]
    top_n: int | None = None
    """Only the best so many are answered."""


class _Call(msgspec.Struct, kw_only=True):
    model: str | None = None
    priority: int | None = None


class _InputsBody(_Call, kw_only=True):
    input: Prompts | None = None
    messages: list[Message] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None


class _Document(msgspec.Struct):
    text: str


_Texts = str | list[str]


class _ScoreBody(_Call, kw_only=True):
    text_1: _Texts | None = None
    text_2: _Texts | None = None
    data_1: _Texts | None = None
    data_2: _Texts | None = None
    queries: _Texts | None = None
    items: _Texts | None = None
    documents: _Texts | None = None


class _RerankBody(_Call, kw_only=True):
    query: str
    documents: list[str | _Document]
    top_n: int | None = None


_INPUTS = msgspec.json.Decoder(_InputsBody)
_SCORE = msgspec.json.Decoder(_ScoreBody)
_RERANK = msgspec.json.Decoder(_RerankBody)


def parse_inputs(body: bytes, model: str, max_model_len: int) -> InputsCall:
    """Of embeddings, pooling and classification: `input` as in a completion's prompt, or `messages`."""
    call = decoded(_INPUTS, body)
    check_model(call.model, model)
    inputs: Sequence[str | list[int]]
    if call.input is not None:
        inputs = separate_prompts(call.input, "input")
    elif call.messages:
        inputs = ["".join(text_of_content(message.content) for message in call.messages)]
    else:
        raise refused("either input or messages must be given", "input", None)
    if call.dimensions is not None and not 1 <= call.dimensions <= DIMENSIONS_MAX:
        raise refused(f"dimensions must be from 1 to {DIMENSIONS_MAX}", "dimensions", call.dimensions)
    if call.encoding_format not in (None, "float", "base64"):
        raise refused("encoding_format must be float or base64", "encoding_format", call.encoding_format)
    return InputsCall(
        _fitting(map(tokens_of_prompt, inputs), max_model_len),
        call.priority or 0,
        tuple(inputs),
        call.dimensions,
        call.encoding_format == "base64",
    )


def parse_score(body: bytes, model: str, max_model_len: int) -> PairsCall:
    """One text against each of several, or as many against as many."""
    call = decoded(_SCORE, body)
    check_model(call.model, model)
    firsts, seconds = _two_sides(call)
    if not firsts or not seconds or len(firsts) not in (1, len(seconds)):
        raise refused("one text, or as many texts as on the other side, are needed", "text_1", len(firsts))
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    return _pairs_call(call, tuple(zip(firsts, seconds, strict=True)), max_model_len)


def parse_rerank(body: bytes, model: str, max_model_len: int) -> PairsCall:
    call = decoded(_RERANK, body)
    check_model(call.model, model)
    if not call.documents:
        raise refused("documents must not be empty", "documents", [])
    texts = [document if isinstance(document, str) else document.text for document in call.documents]
    top_n = call.top_n if call.top_n is not None and call.top_n > 0 else None
    return _pairs_call(call, tuple((call.query, text) for text in texts), max_model_len, top_n)


def _two_sides(call: _ScoreBody) -> tuple[list[str], list[str]]:
    for first, second in (
        (call.text_1, call.text_2),
        (call.data_1, call.data_2),
        (call.queries, call.items),
        (call.queries, call.documents),
    ):
        if first is not None and second is not None:
            return _listed(first), _listed(second)
    raise refused("text_1 and text_2 must be given", "text_1", None)


def _listed(texts: _Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _pairs_call(
    call: _Call, pairs: tuple[tuple[str, str], ...], max_model_len: int, top_n: int | None = None
) -> PairsCall:
    tokens = (count_tokens(text_bytes(first) + text_bytes(second)) for first, second in pairs)
    return PairsCall(_fitting(tokens, max_model_len), call.priority or 0, pairs, top_n)


def _fitting(prompts_tokens: Iterable[int], max_model_len: int) -> tuple[int, ...]:
    checked = tuple(prompts_tokens)
    if max(checked) > max_model_len:
        raise prompt_too_long(max(checked), max_model_len)
    return checked
