"""The paths that reach an engine. Everything else is 404: engines expose dangerous ones."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`generates`: produces tokens, so it needs a bucket and a lease. The others need only a key."""

    path: str
    methods: tuple[str, ...]
    generates: bool
    dialect: Literal["chat", "completions"] | None = None
    summary: str = ""


_ALL = (
    Endpoint("/v1/chat/completions", ("POST",), True, "chat", "Chat completion, streaming or plain"),
    Endpoint("/v1/completions", ("POST",), True, "completions", "Text completion, streaming or plain"),
    Endpoint("/v1/models", ("GET", "HEAD"), False, None, "The models that the engines serve"),
)

ENDPOINTS = {endpoint.path: endpoint for endpoint in _ALL}
