"""A client on a raw socket: it writes any bytes, and sees every byte that comes, and how the end came.

async with RawClient(gateway.port) as client:
    await client.send(post("/v1/chat/completions", chat(stream=True)))
    response = await client.response()
"""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

WAIT_SECONDS_MAX = 15.0
Headers = Sequence[tuple[str, str | bytes]]


def chat(content: str = "Hello", **members: Any) -> dict[str, Any]:
    """The body of a chat completion of some model."""
    return {"model": "mock-gpu", "messages": [{"role": "user", "content": content}], **members}


def request_head(method: str, path: str, headers: Headers = ()) -> bytes:
    lines = [f"{method} {path} HTTP/1.1\r\nhost: gateway\r\n".encode()]
    for name, value in headers:
        lines.append(b"%b: %b\r\n" % (name.encode(), value.encode() if isinstance(value, str) else value))
    return b"".join([*lines, b"\r\n"])


def get(path: str, headers: Headers = ()) -> bytes:
    return request_head("GET", path, headers)


def post(path: str, body: bytes | dict[str, Any], headers: Headers = ()) -> bytes:
    """A whole request. Nothing but `host` and `content-length` is added to the headers."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request_head("POST", path, [*headers, ("content-length", str(len(content)))]) + content


def post_chat(body: bytes | dict[str, Any], headers: Headers = (), *, id: str | None = None) -> bytes:
    """A chat completion; `id` becomes its `x-request-id`."""
    given = [("x-request-id", id)] if id is not None else []
    return post("/v1/chat/completions", body, [*headers, *given])


@dataclass(frozen=True, slots=True)
class RawResponse:
    status: int
    headers: list[tuple[str, str]]
    """Names as they came."""
    body: bytes
    whole: bool
    """The body ended as its framing promised; False when the connection ended first."""

    def header(self, name: str) -> str | None:
        """The only value of this header; two of them fail the test."""
        values = [value for received, value in self.headers if received.lower() == name]
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error that an OpenAI client reads, after a look at its shape."""
        assert self.header("content-type") == "application/json"
        body = self.json
        assert body.keys() == {"error"}
        error: dict[str, Any] = body["error"]
        check_error(error)
        return error


def check_error(error: dict[str, Any]) -> None:
    """A message and a type in words, and `param` and `code` in words or null."""
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert "None" not in error["message"]


class RawClient:
    def __init__(
        self, port: int, *, receive_buffer_bytes: int | None = None, patience: float = WAIT_SECONDS_MAX
    ) -> None:
        """`patience`: seconds that it waits for anything to come."""
        self._port = port
        self._patience = patience
        self._receive_buffer_bytes = receive_buffer_bytes
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> Self:
        opened = socket.socket()
        if self._receive_buffer_bytes is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
        opened.setblocking(False)
        await asyncio.get_running_loop().sock_connect(opened, ("127.0.0.1", self._port))
        self._reader, self._writer = await asyncio.open_connection(sock=opened)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.leave()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def leave(self) -> None:
        """Close the connection, whatever is still to come."""
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            pass  # the other side was faster

    async def reset(self) -> None:
        """Close it with a TCP reset."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await self.leave()

    def end_sending(self) -> None:
        """Close our half of the connection; the other may still answer."""
        self._writer.write_eof()

    async def until(self, mark: bytes) -> bytes:
        """All bytes up to and with this one."""
        async with asyncio.timeout(self._patience):
            return await self._reader.readuntil(mark)

    async def read(self, length: int) -> bytes:
        async with asyncio.timeout(self._patience):
            return await self._reader.readexactly(length)

    async def rest(self) -> bytes:
        """Everything up to the end of the connection, be it a reset."""
        received = b""
        async with asyncio.timeout(self._patience):
            try:
                while piece := await self._reader.read(65536):
                    received += piece
            except ConnectionError:
                pass
        return received

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Status and headers of the next response."""
        lines = (await self.until(b"\r\n\r\n")).decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        version, status, *_ = lines[0].split(" ")
        assert version == "HTTP/1.1"
        return int(status), [(n, v.strip()) for n, _, v in (line.partition(":") for line in lines[1:])]

    async def response(self, method: str = "POST") -> RawResponse:
        """The next whole response, or what came of it."""
        status, headers = await self.head()
        framing = {name.lower(): value for name, value in headers}
        assert len(framing.keys() & {"content-length", "transfer-encoding"}) <= 1
        async with asyncio.timeout(self._patience):
            if method == "HEAD" or status in (204, 304):
                body, whole = b"", True
            elif "transfer-encoding" in framing:
                body, whole = await self._chunked()
            else:
                body, whole = await self._counted(int(framing["content-length"]))
        return RawResponse(status, headers, body, whole)

    async def _counted(self, length: int) -> tuple[bytes, bool]:
        try:
            return await self._reader.readexactly(length), True
        except asyncio.IncompleteReadError as error:
            return error.partial, False

    async def chunk(self) -> bytes:
        """One piece of a chunked body; the empty one ends it. Raises when the connection ends instead."""
        size = int((await self.until(b"\r\n")).strip(), 16)
        return (await self.read(size + 2))[:-2]

    async def _chunked(self) -> tuple[bytes, bool]:
        body = b""
        try:
            while piece := await self.chunk():
                body += piece
        except (asyncio.IncompleteReadError, ConnectionError):
            return body, False
        return body, True


async def ask(port: int, request: bytes, method: str = "POST") -> RawResponse:
    """One request on a connection of its own."""
    async with RawClient(port) as client:
        await client.send(request)
        return await client.response(method)
