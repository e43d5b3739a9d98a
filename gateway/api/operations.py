"""The operators' port: metrics, health, the admin API and the live status page."""

from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI, Header
from fastapi.responses import JSONResponse, Response

from gateway import __version__
from gateway.api.admin import add_admin
from gateway.api.admin_access import NEEDS_TOKEN, Guard
from gateway.api.health import add_health
from gateway.api.status_page import add_status_page
from gateway.api.tenant_pages import answer_in_openai_shape
from gateway.telemetry.exposition import render_in_turns

if TYPE_CHECKING:
    from gateway.api.app import Gateway


def create_operations_app(gateway: "Gateway", token: str | None) -> FastAPI:
    """With a token, everything but the health paths and the page without its figures wants it as
    `Authorization: Bearer TOKEN`."""
    app = FastAPI(title="qos-gateway operations", version=__version__, openapi_url=None)
    guard = Guard(token, gateway.edge.clock)
    add_health(app, gateway.edge)
    answer_in_openai_shape(app)

    @app.get(
        "/metrics",
        dependencies=[Depends(guard.reads)],
        summary="Prometheus exposition",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}, **NEEDS_TOKEN},
    )
    async def metrics(accept: str | None = Header(default=None)) -> Response:
        body, content_type = await render_in_turns(gateway.registry, accept)
        return Response(body, media_type=None, headers={"content-type": content_type})

    @app.get("/openapi.json", dependencies=[Depends(guard.reads)], include_in_schema=False)
    def document() -> JSONResponse:  # in a thread: to write it takes as long as some tokens do
        return JSONResponse(app.openapi())

    add_admin(app, gateway, guard)
    add_status_page(app, guard)
    return app
