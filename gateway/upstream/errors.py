"""What can go wrong on the upstream's side of an exchange, one type per cause.

The types differ in what may be done next. After `ConnectFailed` nothing was sent, so another upstream may be
tried; after `UpstreamClosed` and `FirstByteTimeout` the engine may have begun, so nothing may be sent again;
`IdleTimeout` and `UpstreamAborted` come after the response head, when the client may have its status.
"""

from typing import ClassVar, Literal

Phase = Literal["connect", "head", "body"]
"""How far the exchange had come: connecting, waiting for the response head, or reading the body."""


class UpstreamError(Exception):
    """The other side's fault. `phase` says how far the exchange had come, `message` what happened."""

    phase: ClassVar[Phase]

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConnectFailed(UpstreamError):
    """No connection: refused, unreachable, name not found, TLS, or too slow. Nothing was sent."""

    phase = "connect"

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class UpstreamClosed(UpstreamError):
    """The connection ended after (part of) the request was written and before a complete response head."""

    phase = "head"

    def __init__(self, message: str, *, resend_is_safe: bool = False) -> None:
        super().__init__(message)
        self.resend_is_safe = resend_is_safe
        """A kept-alive connection that ended so soon that the engine cannot have begun."""


class FirstByteTimeout(UpstreamError):
    """No response head in time, counted from the moment the request was written."""

    phase = "head"


class BadResponse(UpstreamError):
    """What came is no HTTP/1.x response head, or one whose framing cannot be trusted."""

    phase = "head"


class IdleTimeout(UpstreamError):
    """The body stood still for too long."""

    phase = "body"


class UpstreamAborted(UpstreamError):
    """The body broke off: reset, early end, malformed framing, more than the reader takes, or given up."""

    phase = "body"
