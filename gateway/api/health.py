"""`/healthz`: the process lives. `/readyz`: it can serve. Neither passes queue, keys or limits.

HEAD is for load balancers that want the status alone. A port answers both without FastAPI, see `pages`; as
routes of it they are documented, and refuse other methods.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gateway.api.edge import Edge

if TYPE_CHECKING:
    from fastapi import FastAPI


def _liveness(edge: Edge) -> tuple[int, str]:
    return 200, "ok"


def _readiness(edge: Edge) -> tuple[int, str]:
    if edge.admission.draining:
        return 503, "draining"
    if not edge.usable_upstreams():
        return 503, "no engine is up"
    return 200, "ready"


LOOKS: Mapping[str, Callable[[Edge], tuple[int, str]]] = {"/healthz": _liveness, "/readyz": _readiness}
"""Path → status, and the word for it."""


def add_health(app: "FastAPI", edge: Edge) -> None:
    from fastapi.responses import JSONResponse

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", summary="Is the process alive?")
    async def healthz() -> JSONResponse:
        status, says = _liveness(edge)
        return JSONResponse({"status": says}, status)

    @app.head("/readyz", include_in_schema=False)
    @app.get(
        "/readyz",
        summary="Can requests be served?",
        responses={503: {"description": "No engine is up, or the gateway is shutting down"}},
    )
    async def readyz() -> JSONResponse:
        """200 while at least one engine may get requests, be it as a trial, and the gateway is not shutting
        down, else 503."""
        status, says = _readiness(edge)
        return JSONResponse({"status": says}, status)
