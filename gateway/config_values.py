"""The kinds of value a setting can have, each with the words an operator reads when it is something else.

Numbers are accepted as numbers or as their text (the environment knows nothing else), never as true or
false, and never as infinity. "Count or null" reads: no limit when null, and nothing passes when 0.
"""

import ipaddress
import math
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_core import PydanticCustomError

ClassName = Literal["P0", "P1", "P2"]
CLASS_NAMES: Final[tuple[ClassName, ...]] = ("P0", "P1", "P2")

MOCK_PRESETS: Final = frozenset({"seed_32k", "a100_llama3_8b", "h100_llama3_8b", "h100_llama_70b_tp4"})
"""The embedded GPUs that `mock://NAME` may name; a test holds them against the GPU model's own list."""

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_DIGEST = re.compile("[0-9a-fA-F]{64}")


def unexpected(expected: str) -> PydanticCustomError:
    """A value of the wrong kind; `expected` ends the sentence "found X, expected …"."""
    return PydanticCustomError("unexpected", "expected {expected}", {"expected": expected})


def _number(
    expected: str,
    *,
    low: float,
    high: float = math.inf,
    above_low: bool = False,
    whole: bool = False,
    nullable: bool = False,
) -> BeforeValidator:
    if nullable:
        expected += ", or null"

    def check(value: object) -> float | None:
        if value is None and nullable:
            return None
        number = _as_number(value)
        if number is None or not low <= number <= high or (above_low and number == low):
            raise unexpected(expected)
        if not whole:
            return float(number)
        if number != int(number):
            raise unexpected(expected)
        return int(number)

    return BeforeValidator(check)


def _as_number(value: object) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return None
    return value if isinstance(value, int) or math.isfinite(value) else None


Port = Annotated[int, _number("a whole number from 0 to 65535", low=0, high=65535, whole=True)]
Count = Annotated[int, _number("a whole number, 0 or more", low=0, whole=True)]
CountOrNull = Annotated[int | None, _number("a whole number, 0 or more", low=0, whole=True, nullable=True)]
PositiveCount = Annotated[int, _number("a whole number, 1 or more", low=1, whole=True)]
Amount = Annotated[float, _number("a number, 0 or more", low=0)]
PositiveAmount = Annotated[float, _number("a number above 0", low=0, above_low=True)]
Fraction = Annotated[float, _number("a fraction from 0 to 1", low=0, high=1)]
PositiveFraction = Annotated[float, _number("a fraction above 0, up to 1", low=0, high=1, above_low=True)]
Seconds = Annotated[float, _number("a number of seconds, 0 or more", low=0)]
PositiveSeconds = Annotated[float, _number("a number of seconds above 0", low=0, above_low=True)]
PositiveSecondsOrNull = Annotated[
    float | None, _number("a number of seconds above 0", low=0, above_low=True, nullable=True)
]
TokensPerSecond = Annotated[float, _number("a number, 1 or more", low=1)]
TokensPerSecondOrNull = Annotated[float | None, _number("a number, 1 or more", low=1, nullable=True)]


def _text(expected: str, fits: Callable[[str], bool], *, nullable: bool = False) -> BeforeValidator:
    if nullable:
        expected += ", or null"

    def check(value: object) -> str | None:
        if value is None and nullable:
            return None
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        if not isinstance(value, str) or not fits(value):
            raise unexpected(expected)
        return value

    return BeforeValidator(check)


def _is_name(value: str) -> bool:
    return value.isprintable() and value == value.strip() != ""


def _is_header_name(value: str) -> bool:
    return _HEADER_NAME.fullmatch(value) is not None


def _is_digest(value: str) -> bool:
    return _DIGEST.fullmatch(value) is not None


def _is_path(value: str) -> bool:
    return value.startswith("/") and _is_graphic(value) and not any(mark in value for mark in "?#")


def _is_graphic(value: str) -> bool:
    """Visible ASCII throughout: what a header value or a request line can carry unescaped."""
    return value != "" and all("!" <= character <= "~" for character in value)


def _is_upstream_url(value: str) -> bool:
    if not _is_graphic(value):
        return False
    try:
        parts = urlsplit(value)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        return False
    if parts.scheme == "mock":
        return parts.netloc in MOCK_PRESETS and value == f"mock://{parts.netloc}"
    return port_fits and parts.scheme in ("http", "https") and _is_plain_origin(parts)


def _is_http_url(value: str) -> bool:
    return value.startswith(("http://", "https://")) and _is_upstream_url(value)


def _is_state(value: str) -> bool:
    if value == "memory":
        return True
    if not _is_graphic(value):
        return False
    try:
        parts = urlsplit(value)
        port_fits = parts.port is None or parts.port > 0
    except ValueError:
        return False
    if parts.query or parts.fragment:
        return False
    if parts.scheme == "unix":
        return parts.path.startswith("/")
    database = parts.path.removeprefix("/")
    is_store = parts.scheme in ("redis", "rediss") and bool(parts.hostname)
    return is_store and port_fits and (not database or database.isdecimal())


def _is_fleet_name(value: str) -> bool:
    return _is_name(value) and not any(brace in value for brace in "{}")


def _is_header_value(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip() != ""


def _is_plain_origin(parts: SplitResult) -> bool:
    return bool(parts.hostname) and "@" not in parts.netloc and not parts.query and not parts.fragment


def _one_or_many(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise unexpected("at least one entry")
    return values


Name = Annotated[str, _text("a name in printable characters (in quotes if it looks like a number)", _is_name)]
Host = Annotated[str, _text("a host name or an IP address", _is_graphic)]
UrlPath = Annotated[str, _text('a path that begins with "/", without "?" and "#"', _is_path)]
HeaderName = Annotated[
    str,
    _text('a header name: letters, digits and "-", as in x-request-priority', _is_header_name),
    AfterValidator(str.lower),
]
UpstreamUrl = Annotated[
    str,
    _text(
        "http://host:port or https://host:port without user name and query, or mock:// with one of "
        + ", ".join(sorted(MOCK_PRESETS)),
        _is_upstream_url,
    ),
    AfterValidator(lambda url: url.rstrip("/")),
]
State = Annotated[
    str,
    _text(
        "memory, or the address of a Redis or Valkey: redis://[user:password@]host:port/0, rediss://… with "
        "TLS, or unix:///path",
        _is_state,
    ),
]
FleetName = Annotated[str, _text("a name in printable characters without { and }", _is_fleet_name)]
HttpUrl = Annotated[
    str, _text("http://host:port/path or https://host:port/path without user name and query", _is_http_url)
]
HeaderValue = Annotated[
    SecretStr, _text("text in printable ASCII (in quotes if it is a number)", _is_header_value)
]
Secret = Annotated[
    SecretStr | None,
    _text("visible ASCII text without spaces (in quotes if it is a number)", _is_graphic, nullable=True),
]

Digest = Annotated[str, _text("64 hexadecimal digits, as `qos-gateway hash-key` prints them", _is_digest)]

NameList = Annotated[tuple[Name, ...], AfterValidator(_not_empty)]
HeaderNameList = Annotated[tuple[HeaderName, ...], BeforeValidator(_one_or_many), AfterValidator(_not_empty)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_no_certificates(path: Path) -> str | None:
    """What is wrong with a file that should have certificates in PEM; None if it has some."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError:
        return "which holds no certificate"
    except FileNotFoundError:
        return "which does not exist"
    except OSError as error:
        return f"which cannot be read: {error.strerror or 'unknown reason'}"
    return None
