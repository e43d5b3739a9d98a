"""Who may use the operators' port, and from where.

With a token every request has to bring it. Without one only this machine can reach the port (settings that
say otherwise are refused at the start), but a browser on this machine runs other people's pages. So:

* a page of another site may not change anything: `Origin` and `Sec-Fetch-Site` tell where a request comes
  from, and a form cannot send `application/json`;
* a name that was made to point here (DNS rebinding) gives such a page the right to read: only addresses, and
  names that public DNS cannot have, are accepted as `Host`.
"""

import ipaddress
from secrets import compare_digest
from typing import Any, Final

import structlog
from fastapi import Header, HTTPException, Request

from gateway.policy.clock import NANOSECONDS_PER_SECOND, Clock

NEEDS_TOKEN: Final[dict[int | str, dict[str, Any]]] = {
    401: {"description": "The operations token is missing or wrong"},
    403: {"description": "Without a token: asked under a name, or by a page, that is not this gateway's"},
}

_JSON = "application/json"
_QUIET_NS = NANOSECONDS_PER_SECOND

_log = structlog.get_logger("gateway")


class Guard:
    """Its methods are dependencies of FastAPI: they raise HTTPException, or nothing."""

    def __init__(self, token: str | None, clock: Clock) -> None:
        self._expected = None if token is None else b"Bearer " + token.encode()
        self._strangers = _Strangers(clock)

    async def is_local(self, request: Request) -> None:
        """For what is no secret: the page without its figures."""
        if self._expected is None:
            _check_host(request)

    async def reads(self, request: Request, authorization: str | None = Header(default=None)) -> None:
        if self._expected is None:
            _check_host(request)
        elif not compare_digest((authorization or "").encode(), self._expected):
            self._strangers.came(address_of(request), wrong=authorization is not None)
            challenge = {"www-authenticate": "Bearer"}
            raise HTTPException(401, "the operations token is missing or wrong", challenge)

    async def changes(self, request: Request, authorization: str | None = Header(default=None)) -> None:
        await self.reads(request, authorization)
        kind = request.headers.get("content-type")
        if kind is not None and kind.split(";")[0].strip().lower() != _JSON:
            raise HTTPException(415, f"content-type: expected {_JSON}")
        if self._expected is None:
            _check_origin(request)


class _Strangers:
    """Who comes without the token is logged, once a second at most: one who tries them all must not fill the
    disk. What is left out is counted in the next line. No token is ever in it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at: int | None = None
        self._requests = self._wrong = 0

    def came(self, address: str, *, wrong: bool) -> None:
        """`wrong`: with a token that is not the gateway's, rather than with none."""
        self._requests += 1
        self._wrong += wrong
        now = self._clock.now()
        if self._said_at is None or now - self._said_at >= _QUIET_NS:
            says = "the operators' port was asked without its token"
            _log.warning(says, requests=self._requests, wrong_tokens=self._wrong, last_from=address)
            self._said_at = now
            self._requests = self._wrong = 0


def address_of(request: Request) -> str:
    client = request.client
    return "unknown" if client is None else f"{client.host}:{client.port}"


def _check_host(request: Request) -> None:
    given = request.headers.get("host")
    if given is not None and not is_local_name(given):
        says = (
            "Host: expected an address or localhost; set server.operations_token to be asked by other names"
        )
        raise HTTPException(403, says)


def is_local_name(host: str) -> bool:
    """Whether no public DNS name: an IP address, `localhost`, or a name of one label; a port may follow."""
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return "." not in name or name.lower().endswith(".localhost")
    return True


def _check_origin(request: Request) -> None:
    """A browser says where a request comes from, and no page can make it say otherwise; other clients say
    nothing."""
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    own = (None, f"http://{request.headers.get('host', '')}")
    if site not in ("none", "same-origin") or origin not in own:
        raise HTTPException(403, "Origin: pages of other sites may change nothing here")
