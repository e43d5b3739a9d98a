"""The operators' port: metrics, health, and what the policy holds at this moment."""

from collections.abc import Awaitable, Callable
from secrets import compare_digest
from typing import Any

from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from gateway import __version__
from gateway.api.configuration import Difference
from gateway.api.edge import Edge
from gateway.api.health import add_health
from gateway.api.inference import answer_in_openai_shape
from gateway.config_reading import ConfigError
from gateway.policy.capacity_loop import CapacityLoop
from gateway.policy.class_rates import Rates
from gateway.policy.clock import to_seconds
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.telemetry.exposition import render_in_turns

NEEDS_TOKEN: dict[int | str, dict[str, Any]] = {
    401: {"description": "The operations token is missing or wrong"}
}


class ReloadResult(BaseModel):
    """Names of settings that are others now, and of those that stay as they were until a restart."""

    changed: list[str]
    needs_restart: list[str]


def create_operations_app(
    edge: Edge,
    registry: CollectorRegistry,
    token: str | None,
    reload: Callable[[], Awaitable[Difference]],
) -> FastAPI:
    """With a token, everything but the health paths wants it as `Authorization: Bearer TOKEN`."""
    app = FastAPI(title="qos-gateway operations", version=__version__, docs_url=None, redoc_url=None)
    add_health(app, edge)
    answer_in_openai_shape(app)

    def operator(authorization: str | None = Header(default=None)) -> None:
        if token is not None:
            presented = (authorization or "").encode()
            if not compare_digest(presented, b"Bearer " + token.encode()):
                raise HTTPException(401, "the operations token is missing or wrong")

    @app.get(
        "/metrics",
        dependencies=[Depends(operator)],
        summary="Prometheus exposition",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}, **NEEDS_TOKEN},
    )
    async def metrics(accept: str | None = Header(default=None)) -> Response:
        body, content_type = await render_in_turns(registry, accept)
        return Response(body, media_type=None, headers={"content-type": content_type})

    @app.get(
        "/admin/state",
        dependencies=[Depends(operator)],
        summary="Budgets, queues and places now",
        responses=NEEDS_TOKEN,
    )
    async def state() -> JSONResponse:
        return JSONResponse(policy_state(edge))

    @app.post(
        "/admin/reload",
        dependencies=[Depends(operator)],
        summary="Read the configuration again",
        responses={422: {"description": "It is wrong; the old one stays in force"}, **NEEDS_TOKEN},
    )
    async def reload_configuration() -> ReloadResult:
        """Answers when all of it is in force. One that is wrong changes nothing, and the answer says why."""
        try:
            found = await reload()
        except ConfigError as error:
            raise HTTPException(422, str(error)) from None
        return ReloadResult(changed=list(found.changed), needs_restart=list(found.needs_restart))

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
                "controller": _controller_state(pool.control, now),
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
                        "engine_limit": slots.engine_limit.at(now),
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
    leaving = {slots.name: slots.in_flight_total for slots in edge.admission.leaving}
    return {"draining": edge.admission.draining, "pools": pools, "leaving_in_flight": leaving}


def _controller_state(control: CapacityLoop, now: int) -> dict[str, Any]:
    advice = control.advice
    return {
        "law": control.law.name,
        "severity": control.severity,
        "nominal_capacity_tokens_per_second": control.limits.nominal / MILLITOKENS,
        "floor_tokens_per_second": _by_class(control.limits.floors),
        "advises_only": control.advises_only,
        "advice": None
        if advice is None
        else {"reason": advice.reason, "rates_tokens_per_second": _by_class(advice.rates)},
        "last_changes": [
            {
                "seconds_ago": to_seconds(now - change.at),
                "reason": change.reason,
                "direction": change.direction,
                "applied": change.applied,
                "rates_tokens_per_second": _by_class(change.new_rates),
                "inputs": change.inputs,
            }
            for change in reversed(control.last_changes)
        ],
    }


def _by_class(rates: Rates) -> dict[str, float]:
    return {p.name: rates[p] / MILLITOKENS for p in PRIORITIES}
