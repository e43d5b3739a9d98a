"""The few ASGI messages that the mock exchanges with its server."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

START = "http.response.start"
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"


async def read_body(receive: Receive) -> bytes | None:
    """The whole body, or None when the client went away first."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def client_gone(receive: Receive) -> None:
    """Returns when the client has gone, or its answer is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
    content_type: bytes | None = JSON,
) -> None:
    all_headers = [(b"content-length", b"%d" % len(body)), *(headers or [])]
    if content_type is not None:
        all_headers.append((b"content-type", content_type))
    await send(response_start(status, all_headers))
    await send(response_body(body, more=False))


def response_start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": START, "status": status, "headers": headers}


def response_body(body: bytes, more: bool = True, tokens: int = 0) -> Message:
    """`tokens` of the answer are in it: of no interest to the server, but to those in between."""
    return {"type": "http.response.body", "body": body, "more_body": more, "tokens": tokens}
