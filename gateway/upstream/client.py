"""One engine as the edge sees it: where it is, how to log in there, and how to send it a request."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.upstream.content_coding import DecodedResponse, decoded
from gateway.upstream.errors import BadResponse
from gateway.upstream.tls import client_context
from gateway.upstream.transport import StreamedBody, TransportTimeouts, UpstreamResponse, UpstreamTransport

Response = UpstreamResponse | DecodedResponse

STATUS_MAX = 599


@dataclass(frozen=True, slots=True)
class UpstreamAddress:
    """`credential` is the whole value of the Authorization header, None to send none. `tls_ca_file` has the
    certificates to trust instead of the system's."""

    name: str
    url: str
    models: tuple[str, ...] = ("*",)
    credential: bytes | None = None
    engine_priority: str = "none"  # none | vllm | sglang
    tls_ca_file: Path | None = None
    tls_verify: bool = True


class Upstream:
    def __init__(self, address: UpstreamAddress, timeouts: TransportTimeouts) -> None:
        self.address = address
        verify: ssl.SSLContext | bool = address.tls_verify
        if address.tls_ca_file is not None:
            verify = client_context(address.tls_ca_file)
        self.transport = UpstreamTransport(address.url, timeouts=timeouts, verify=verify)

    @property
    def name(self) -> str:
        return self.address.name

    async def send(
        self,
        method: bytes,
        target: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | StreamedBody = b"",
    ) -> Response:
        """Raises `UpstreamError`, and what the source of a streamed body raises."""
        response = await self.transport.send(method, target, headers, body)
        if response.status > STATUS_MAX:
            response.abort()
            raise BadResponse(f"there is no status {response.status}")
        return decoded(response)

    async def get(self, path: str, accept: bytes) -> Response:
        """Look at a page of the engine's own, with its credential. Raises `UpstreamError`."""
        headers = [(b"accept", accept)]
        if self.address.credential is not None:
            headers.append((b"authorization", self.address.credential))
        return decoded(await self.transport.send(b"GET", path.encode(), headers))

    async def aclose(self) -> None:
        await self.transport.aclose()
