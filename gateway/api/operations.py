"""The operators' port: metrics, health, and what the policy holds at this moment."""

from secrets import compare_digest
from typing import Any

from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.api.edge import Edge
from gateway.api.health import add_health
from gateway.api.inference import answer_in_openai_shape
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.telemetry.exposition import render_in_turns


def create_operations_app(edge: Edge, registry: CollectorRegistry, token: str | None) -> FastAPI:
    """With a token, everything but the health paths wants it as `Authorization: Bearer TOKEN`."""
    app = FastAPI(title="qos-gateway operations", version=__version__, docs_url=None, redoc_url=None)
    add_health(app, edge)
    answer_in_openai_shape(app)

    def operator(authorization: str | None = Header(default=None)) -> None:
        if token is not None:
            presented = (authorization or "").encode()
            if not compare_digest(presented, b"Bearer " + token.encode()):
                raise HTTPException(401, "the operations token is missing or wrong")

    @app.get("/metrics", dependencies=[Depends(operator)], summary="Prometheus exposition")
    async def metrics(accept: str | None = Header(default=None)) -> Response:
        body, content_type = await render_in_turns(registry, accept)
        return Response(body, media_type=None, headers={"content-type": content_type})

    @app.get("/admin/state", dependencies=[Depends(operator)], summary="Budgets, queues and places now")
    async def state() -> JSONResponse:
        return JSONResponse(policy_state(edge))

    return app


def policy_state(edge: Edge) -> dict[str, Any]:
    edge.gate.advance()
    now = edge.clock.now()
    pools = []
    for pool in edge.admission.pools:
        buckets = pool.buckets
        pools.append(
            {
                "capacity_tokens_per_second": buckets.capacity / MILLITOKENS,
                "classes": {
                    p.name: {
                        "rate_tokens_per_second": buckets.rates[p] / MILLITOKENS,
                        "bucket_tokens": buckets.level_tokens(p),
                        "throttled": len(pool.throttled[p]),
                        "ready": pool.scheduler.ready[p].length,
                    }
                    for p in PRIORITIES
                },
                "upstreams": {
                    slots.name: {
                        "healthy": slots.healthy,
                        "on_trial": slots.on_trial,
                        "in_flight": {p.name: slots.in_flight[p] for p in PRIORITIES},
                        "max_in_flight": slots.max_in_flight,
                        "in_flight_tokens": slots.in_flight_tokens,
                        "max_in_flight_tokens": slots.max_in_flight_tokens,
                        "pending_prefill_tokens": slots.pending_prefill_tokens,
                        "engine_waiting": slots.load.waiting(slots.prefills, now),
                        "engine_kv_usage": slots.load.kv_usage(slots.in_flight_tokens, now),
                    }
                    for slots in pool.slots
                },
            }
        )
    return {"draining": edge.admission.draining, "pools": pools}
