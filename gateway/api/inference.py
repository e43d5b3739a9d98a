"""The tenants' port: inference paths on the fast lane, everything else through FastAPI.

The inference paths are an ASGI application ahead of FastAPI's router, by path: a handler function with a
streaming response costs the data path three times as much CPU. They are documented in the same OpenAPI
page all the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import __version__
from gateway.api.edge import Edge
from gateway.api.endpoints import Endpoint, nowhere
from gateway.api.errors import error_body
from gateway.api.exchange import Exchange
from gateway.api.health import add_health


class TenantApp:
    """The ASGI application of the tenants' port."""

    def __init__(self, edge: Edge, own: ASGIApp, own_paths: frozenset[str]) -> None:
        self._edge = edge
        self._own = own
        self._own_paths = own_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._own_paths:
            await self._own(scope, receive, send)
        else:
            path = scope["path"]
            endpoint = self._edge.endpoints.get(path) or nowhere(path)
            await Exchange(self._edge, endpoint, scope, receive, send).run()


def create_tenant_app(edge: Edge) -> TenantApp:
    own = FastAPI(title="qos-gateway", version=__version__, docs_url=None, redoc_url=None)
    add_health(own, edge)
    answer_in_openai_shape(own)
    describe_endpoints(own, lambda: edge.endpoints.values())
    return TenantApp(edge, own, frozenset({"/healthz", "/readyz", "/openapi.json"}))


def answer_in_openai_shape(app: FastAPI) -> None:
    """FastAPI's own errors (404, 405, 422, …) like all others."""

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        code = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        body = error_body(str(error.detail), "invalid_request_error", None, code)
        headers = dict(error.headers or {})
        return Response(body, error.status_code, headers, "application/json")

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        body = error_body(
            f"{field}: {first['msg']}", "invalid_request_error", field or None, "invalid_request"
        )
        return Response(body, 422, None, "application/json")


def describe_endpoints(app: FastAPI, endpoints: Callable[[], Iterable[Endpoint]]) -> None:
    """Put the paths of the fast lane into the OpenAPI page; a reload may add some and take some away."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        page = generate()
        fast = {e.path: {m.lower(): _operation(e, m) for m in e.methods} for e in endpoints()}
        return {**page, "paths": {**page["paths"], **fast}}

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(endpoint: Endpoint, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": "The engine's answer, unchanged"},
            "default": {"description": "An error of the gateway or of the engine, in this API's form"},
        },
    }
    if method == "POST":
        kind = "multipart/form-data" if endpoint.takes_form else "application/json"
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": {}}}}
    if endpoint.is_budgeted(method):
        operation["parameters"] = [
            {
                "name": "x-request-priority",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "enum": ["P0", "P1", "P2", "realtime", "normal", "batch"]},
            }
        ]
        operation["responses"]["429"] = {"description": "Refused; `retry-after` says when to come back"}
    return operation
