"""The live status page at `/` of the operators' port: three files, and a policy that lets in nothing else.

The files hold no figures and need no token. The script asks `/admin/…` for them, with the token that the
operator gives it.
"""

from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import Depends, FastAPI
from fastapi.responses import Response

from gateway.api.admin_access import Guard

_KINDS: Final = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "script.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_status_page(app: FastAPI, guard: Guard) -> None:
    local = [Depends(guard.is_local)]

    @app.get(
        "/",
        summary="Live status page",
        dependencies=local,
        response_class=Response,
        responses=_content("index.html"),
    )
    async def page() -> Response:
        return _file("index.html")

    for name in _KINDS:
        app.add_api_route(
            f"/status/{name}",
            lambda name=name: _file(name),
            include_in_schema=False,
            dependencies=local,
            response_class=Response,
        )


def _content(name: str) -> dict[int | str, dict[str, dict[str, dict[str, str]]]]:
    return {200: {"content": {_KINDS[name].partition(";")[0]: {}}}}


def _file(name: str) -> Response:
    return Response(_bytes(name), headers={**HEADERS, "content-type": _KINDS[name]})


@cache
def _bytes(name: str) -> bytes:
    return (files("gateway") / "status_page" / name).read_bytes()
