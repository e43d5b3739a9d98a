"""`/healthz`: the process lives. `/readyz`: it can serve. Neither passes queue, keys or limits.

HEAD is for load balancers that want the status alone.
"""

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from gateway.api.edge import Edge


def add_health(app: FastAPI, edge: Edge) -> None:
    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", summary="Is the process alive?")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @app.head("/readyz", include_in_schema=False)
    @app.get(
        "/readyz",
        summary="Can requests be served?",
        responses={503: {"description": "No engine is up, or the gateway is shutting down"}},
    )
    async def readyz() -> JSONResponse:
        """200 while at least one engine may get requests, be it as a trial, and the gateway is not shutting
        down, else 503."""
        if edge.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not edge.usable_upstreams():
            return JSONResponse({"status": "no engine is up"}, 503)
        return JSONResponse({"status": "ready"})
