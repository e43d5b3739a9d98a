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

from fastapi import Header, HTTPException, Request

NEEDS_TOKEN: Final[dict[int | str, dict[str, Any]]] = {
    401: {"description": "The operations token is missing or wrong"},
    403: {"description": "Without a token: asked under a name, or by a page, that is not this gateway's"},
}

_JSON = "application/json"


class Guard:
    """Its methods are dependencies of FastAPI: they raise HTTPException, or nothing."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else b"Bearer " + token.encode()

    def is_local(self, request: Request) -> None:
        """For what is no secret: the page without its figures."""
        if self._expected is None:
            _check_host(request)

    def reads(self, request: Request, authorization: str | None = Header(default=None)) -> None:
        if self._expected is None:
            _check_host(request)
        elif not compare_digest((authorization or "").encode(), self._expected):
            challenge = {"www-authenticate": "Bearer"}
            raise HTTPException(401, "the operations token is missing or wrong", challenge)

    def changes(self, request: Request, authorization: str | None = Header(default=None)) -> None:
        self.reads(request, authorization)
        kind = request.headers.get("content-type")
        if kind is not None and kind.split(";")[0].strip().lower() != _JSON:
            raise HTTPException(415, f"content-type: expected {_JSON}")
        if self._expected is None:
            _check_origin(request)


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
