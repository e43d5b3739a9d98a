"""A request's body that need not be here before the request is served.

    client ──receive──▶ [checks, the form's fields] ──▶ kept ──pieces──▶ engine

One reader takes in what the client sends. Until the request has a place at an engine all of it is kept, as of
any other request: the client need not wait, and its leaving shows. With the place it is handed on as it
comes, and no more is taken than the engine takes. `body_read_seconds` counts the time in which we wait for
the client, `max_body_bytes` every byte.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.types import Receive, Scope

from gateway.api.audio_form import AudioForm, audio_facts
from gateway.api.body import BadBody, BodyFacts
from gateway.api.errors import Problem
from gateway.api.request_body import BodyLimits, ClientLeft, check_body_headers, too_large, too_late
from gateway.policy.outcome import Outcome
from gateway.upstream.upload import StreamedBody

T = TypeVar("T")

HELD_BYTES_MAX = 64 * 1024
"""While the engine is slower than the client; the server below holds as much again."""


class ClientUpload:
    """`complete`: the client has sent all. `consumed`: an engine has had some of it, so it cannot be sent
    again. `fault`: why there will be no more of it, told by whoever reads it."""

    def __init__(self, scope: Scope, receive: Receive, limits: BodyLimits) -> None:
        """Raises Problem (400, 413)."""
        self.content_type = _content_type(scope)
        self.length = check_body_headers(scope["headers"], limits)
        self.complete = False
        self.consumed = False
        self.fault: Problem | None = None
        self._receive = receive
        self._limits = limits
        self._form = _understood(AudioForm, self.content_type)
        self._seconds_left = limits.read_seconds
        self._received_bytes = 0
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._handed_on_bytes = 0
        self._changed = asyncio.Event()

    async def facts(self) -> BodyFacts:
        """Read until the model is known. Raises Problem (400, 413) and ClientLeft."""
        while self._form.model is None and not self.complete:
            await self._take_piece()
        model = self._form.model
        if model is None:
            raise Problem(
                Outcome.BAD_REQUEST, "model is required", param="model", code="missing_required_parameter"
            )
        # While the upload lasts, the time to the first token is the client's as well: it is no sample then.
        return audio_facts(model, stream=self._form.stream and self.complete, body_bytes=self._known_bytes)

    @property
    def handed_on(self) -> bool:
        """An engine has all of it, and may have begun."""
        return self._handed_on_bytes == self._known_bytes

    @property
    def queue_bytes(self) -> int:
        """What it may come to keep while it waits."""
        known = self._known_bytes
        return self._limits.max_bytes if known is None else known

    @property
    def _known_bytes(self) -> int | None:
        return self._received_bytes if self.complete else self.length

    async def take_in(self) -> None:
        """All that is still to come; no faster than the engine takes it, once it does. Raises Problem and
        ClientLeft, and then hands on no more."""
        while not self.complete:
            if self.consumed and self._kept_bytes > HELD_BYTES_MAX:
                self._changed.clear()
                await self._changed.wait()
            else:
                await self._take_piece()
                self._changed.set()

    def body(self) -> StreamedBody:
        """For an engine. As long as nothing is consumed there may be another one, for another engine. Raises
        Problem where it is known already that it cannot be whole."""
        if self.fault is not None:
            raise self.fault
        return StreamedBody(self._pieces(), self._known_bytes)

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.consumed = True
        while True:
            while self._kept:
                piece = self._kept.popleft()
                self._kept_bytes -= len(piece)
                self._handed_on_bytes += len(piece)
                self._changed.set()
                yield piece
            if self.complete:
                return
            self._changed.clear()
            await self._changed.wait()

    async def _take_piece(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._seconds_left):
                message = await self._receive()
        except TimeoutError:
            raise too_late(self._limits) from None
        self._seconds_left -= loop.time() - began
        if message["type"] == "http.disconnect":
            raise ClientLeft
        piece = message.get("body", b"")
        self._received_bytes += len(piece)
        if self._received_bytes > self._limits.max_bytes:
            raise too_large(self._limits)
        _understood(self._form.feed, piece)
        if piece:
            self._kept.append(piece)
            self._kept_bytes += len(piece)
        self.complete = not message.get("more_body", False)


def _content_type(scope: Scope) -> bytes:
    given = [value for name, value in scope["headers"] if name == b"content-type"]
    if len(given) > 1:
        raise Problem(
            Outcome.BAD_REQUEST,
            "header content-type is given more than once",
            param="content-type",
            code="invalid_value",
            close=True,
        )
    return b"".join(given)


def _understood(read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return read(data)
    except BadBody as bad:
        raise Problem(Outcome.BAD_REQUEST, bad.message, param=bad.param, code=bad.code, close=True) from None
