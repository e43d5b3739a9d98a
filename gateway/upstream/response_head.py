"""Which response heads can be trusted, and what they say of the body's end."""

from collections.abc import Sequence

from gateway.upstream.errors import BadResponse
from gateway.upstream.response import UpstreamResponse

HTTP_VERSIONS = frozenset({"1.1", "1.0"})
HEAD_BYTES_MAX = 64 * 1024


def check_head(status: int, version: str, headers: Sequence[tuple[bytes, bytes]], head_bytes: int) -> None:
    """Raises `BadResponse`. `head_bytes`: what has been received up to the read in which the head ended."""
    if status < 200:
        raise BadResponse(f"status {status} was not asked for")
    if version not in HTTP_VERSIONS:
        raise BadResponse(f"HTTP/{version} is not spoken here")
    if head_bytes > HEAD_BYTES_MAX and _block_bytes(headers) > HEAD_BYTES_MAX:
        raise BadResponse("the header block is too large")
    for name, value in headers:
        # Any other coding would leave the body's end, or its meaning, to guesswork: none was asked for.
        if len(name) == 17 and name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise BadResponse(f"transfer-encoding {value!r} was not asked for")


def ends_with_connection(response: UpstreamResponse) -> bool:
    """Whether the body goes on until the upstream closes."""
    return response.header(b"content-length") is None and response.header(b"transfer-encoding") is None


def _block_bytes(headers: Sequence[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
