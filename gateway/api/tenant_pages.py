"""The pages of the tenants' port that FastAPI answers: its OpenAPI page, and what is wrong with a request
for a health path.

The inference paths, which never come here, are documented in the same OpenAPI page all the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from gateway import __version__
from gateway.api.edge import Edge
from gateway.api.endpoints import Endpoint
from gateway.api.errors import error_body
from gateway.api.health import add_health


def tenant_pages(edge: Edge) -> FastAPI:
    app = FastAPI(title="qos-gateway", version=__version__, docs_url=None, redoc_url=None)
    add_health(app, edge)
    answer_in_openai_shape(app)
    describe_endpoints(app, lambda: edge.endpoints.values())
    return app


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
