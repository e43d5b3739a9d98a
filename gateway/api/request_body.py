"""Take in a request's body: bounded in bytes and in time."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.api.channel import Channel
from gateway.api.errors import Problem
from gateway.api.headers import Header
from gateway.policy.outcome import Outcome

BODY_HEADERS = frozenset({b"content-length", b"content-encoding"})


class ClientLeft(Exception):
    """The client closed before its request was complete."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int
    read_seconds: float


async def receive_body(
    headers: Sequence[Header],
    channel: Channel,
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
    limits: BodyLimits,
) -> bytes:
    """The whole body. Raises Problem (413, 400) without reading on, and ClientLeft."""
    check_body_headers(headers, limits)
    body = channel.body_at_once()
    if body is not None:
        if len(body) > limits.max_bytes:
            raise too_large(limits)
        return body
    try:
        async with asyncio.timeout(limits.read_seconds):
            return await _receive(receive, limits)
    except TimeoutError:
        raise too_late(limits) from None


def check_body_headers(headers: Sequence[Header], limits: BodyLimits) -> int | None:
    """The length that is told, if any. Raises Problem (413, 400) for a body that need not be read at all."""
    length = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
            if length > limits.max_bytes:
                raise too_large(limits)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise Problem(
                Outcome.BAD_REQUEST,
                f"header content-encoding: '{value[:40].decode('ascii', 'replace')}' bodies are not accepted",
                param="content-encoding",
                code="unsupported_content_encoding",
                close=True,
            )
    return length


async def _receive(receive: Callable[[], Awaitable[MutableMapping[str, Any]]], limits: BodyLimits) -> bytes:
    pieces: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        length += len(piece)
        if length > limits.max_bytes:
            raise too_large(limits)
        pieces.append(piece)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def too_large(limits: BodyLimits) -> Problem:
    message = f"the body is larger than {limits.max_bytes} bytes"
    return Problem(Outcome.TOO_LARGE, message, param="body", close=True)


def too_late(limits: BodyLimits) -> Problem:
    message = f"the body did not arrive within {limits.read_seconds:g} s"
    return Problem(Outcome.BAD_REQUEST, message, code="request_body_timeout", close=True)
