"""Engines that compress their answers though they were asked not to: read as if they had not."""

import zlib

from gateway.upstream.errors import BadResponse, UpstreamAborted
from gateway.upstream.response import UpstreamResponse, read_whole

CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate"})
PIECE_BYTES_MAX = 256 * 1024
"""A few compressed bytes can be very many; no more than this is unpacked at once."""

_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32  # told apart by how they begin


class DecodedResponse:
    """A response without its coding: what its reader calls is what he calls of an `UpstreamResponse`."""

    def __init__(self, response: UpstreamResponse) -> None:
        self._response = response
        self._decompressor = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._held = b""
        self._begun = False
        self.status = response.status

    def lower_headers(self) -> list[tuple[bytes, bytes]]:
        coded = (b"content-encoding", b"content-length")
        return [header for header in self._response.lower_headers() if header[0] not in coded]

    async def read(self) -> bytes:
        while True:
            data = self._held or await self._response.read()
            if self._decompressor.eof or not (data or self._begun):
                if not data:
                    return b""
                continue  # something behind the end: dropped
            piece = self._decompress(data)
            if piece:
                return piece

    async def read_all(self, limit: int) -> bytes:
        return await read_whole(self, limit)

    def abort(self) -> None:
        self._response.abort()

    def _decompress(self, data: bytes) -> bytes:
        self._begun = True
        try:
            piece = self._decompressor.decompress(data, PIECE_BYTES_MAX)
        except zlib.error as error:
            self.abort()
            raise UpstreamAborted(f"malformed body: {error}") from error
        self._held = self._decompressor.unconsumed_tail
        if not data and not piece:
            raise UpstreamAborted("the compressed body broke off")
        return piece


def decoded(response: UpstreamResponse) -> UpstreamResponse | DecodedResponse:
    """Raises `BadResponse` for a coding that is not known here."""
    coding = (response.header(b"content-encoding") or b"identity").strip().lower()
    if coding in (b"", b"identity"):
        return response
    if coding in CODINGS:
        return DecodedResponse(response)
    response.abort()
    raise BadResponse(f"content-encoding {coding[:40]!r} was not asked for")
