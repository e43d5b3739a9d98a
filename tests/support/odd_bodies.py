"""Bodies that are nearly right, for a gateway that must answer every one of them.

A good body of some API is taken, a member here and there is replaced by something odd, and the text is then
perhaps cut, doubled, or littered with bytes.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, "/v1/rerank", "/v1/score", "/tokenize")

Strategy = st.SearchStrategy[Any]


class Literally(str):
    """A piece of JSON text that `json.dumps` would not write."""


_ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]
).map(lambda number: Literally(json.dumps(number))) | st.sampled_from(
    [
        Literally(text)
        for text in ("NaN", "Infinity", "-Infinity", "1e999", "-", "01", "1.", "0x10", "9" * 400)
    ]
)
_ODD_TEXTS = st.sampled_from(
    [
        *("", " ", "\x00", "\n", "null", "true", "P0", "user", "x" * 10_000, "e\u0301", "\u202e\u200d\ufeff"),
        *(
            "\U0001f468\u200d\U0001f469",
            "\ud800",
            "\udc00\ud800",
            "\uffff",
            "</script>",
            "' OR 1=1",
            "%s%n{0}",
        ),
    ]
) | st.text(max_size=12)
_DEEP = st.integers(1, 4000).map(lambda depth: Literally("[" * depth + "]" * depth)) | st.integers(
    1, 2000
).map(lambda depth: Literally('{"a":' * depth + "1" + "}" * depth))
_ODD_SIMPLE = st.none() | st.booleans() | _ODD_NUMBERS | _ODD_TEXTS
ODD: Strategy = (
    _ODD_SIMPLE
    | _DEEP
    | st.recursive(
        _ODD_SIMPLE,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_ODD_TEXTS, inner, max_size=3),
        max_leaves=6,
    )
)

_CONTENT = st.one_of(
    st.text(max_size=30),
    st.just([{"type": "text", "text": "Hi"}]),
    st.just([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    st.just([{"type": "input_text", "text": "Hi"}, {"type": "input_image", "image_url": "http://a/b"}]),
)
_TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": _CONTENT}
    ),
    min_size=1,
    max_size=3,
)
_TOOLS = st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
_TEXT_OR_IDS = st.text(max_size=20) | st.lists(st.integers(0, 9), max_size=5) | st.just(["a", "b"])
_ALWAYS: dict[str, Strategy] = {"model": st.just("mock-gpu")}
_MAYBE: dict[str, Strategy] = {
    "stream": st.booleans(),
    "max_tokens": st.integers(1, 50),
    "temperature": st.floats(0, 2),
    "service_tier": st.sampled_from(["auto", "flex", "priority", "standard_only"]),
    "user": st.text(max_size=5),
    "priority": st.integers(-5, 5),
    "request_id": st.text(max_size=5),
    "n": st.integers(1, 4),
}


def _body(always: dict[str, Strategy], **maybe: Strategy) -> Strategy:
    return st.fixed_dictionaries(_ALWAYS | always, optional=_MAYBE | maybe)


_GOOD: dict[str, Strategy] = {
    CHAT: _body(
        {"messages": _TURNS},
        tools=_TOOLS,
        stream_options=st.just({"include_usage": True}),
        max_completion_tokens=st.integers(1, 50),
        response_format=st.just({"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}),
    ),
    COMPLETIONS: _body({"prompt": _TEXT_OR_IDS}, best_of=st.integers(1, 4), suffix=st.text(max_size=5)),
    RESPONSES: _body(
        {"input": st.text(max_size=30) | _TURNS},
        instructions=st.text(max_size=9),
        background=st.booleans(),
        max_output_tokens=st.integers(1, 50),
        tools=_TOOLS,
    ),
    MESSAGES: _body({"messages": _TURNS}, system=_CONTENT, tools=_TOOLS),
    EMBEDDINGS: _body({"input": _TEXT_OR_IDS}, encoding_format=st.sampled_from(["float", "base64"])),
    "/v1/rerank": _body({"query": st.text(max_size=9), "documents": st.just(["a", "b"])}),
    "/v1/score": _body({"text_1": _TEXT_OR_IDS, "text_2": _TEXT_OR_IDS}),
    "/tokenize": _body({"prompt": st.text(max_size=9)}),
}


@st.composite
def _mutated(draw: Callable[[Strategy], Any], path: str) -> Any:
    """A good body in which up to three places hold something odd."""
    body = deepcopy(draw(_GOOD[path]))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = body
        while True:
            keys = [*place, "odd"] if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
            inner = place.get(key) if isinstance(place, dict) else place[key]
            if not (isinstance(inner, dict | list) and inner and draw(st.booleans())):
                break
            place = inner
        place[key] = draw(ODD)
    return body


def _written(value: Any, doubled: str | None = None) -> str:
    """JSON text, with one member of the outermost object written a second time if it is `doubled`."""
    if isinstance(value, Literally):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}:{_written(inner)}" for key, inner in value.items()]
        if doubled is not None:
            name = json.dumps(doubled)
            if doubled.isalnum() and len(doubled) % 2:  # the same name, written in another way
                name = f'"\\u{ord(doubled[0]):04x}{name[2:]}'
            members.append(f"{name}:{_written(value[doubled])}")
        return "{" + ",".join(members) + "}"
    return json.dumps(value)


@st.composite
def bodies(draw: Callable[[Strategy], Any], path: str) -> bytes:
    """A body for this path, right or not, as it would stand on the wire."""
    kind = draw(
        st.sampled_from(["as it is"] * 5 + ["doubled", "cut", "spoiled", "followed", "other", "bytes"])
    )
    if kind == "bytes":
        return draw(st.binary(max_size=200))
    if kind == "other":
        return _written(draw(ODD)).encode(errors="surrogatepass")
    body = draw(_mutated(path))
    if kind == "doubled":
        return _written(body, draw(st.sampled_from(list(body)))).encode(errors="surrogatepass")
    text = _written(body).encode(errors="surrogatepass")
    if kind == "cut":
        return text[: draw(st.integers(0, len(text)))]
    if kind == "spoiled":
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.binary(min_size=1, max_size=4)) + text[at + 1 :]
    if kind == "followed":
        return (
            draw(st.sampled_from([b"\xef\xbb\xbf", b" \n", b"\x00", b""]))
            + text
            + draw(st.binary(max_size=4))
        )
    return text
