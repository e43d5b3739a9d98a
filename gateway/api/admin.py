"""`/admin/…` on the operators' port: to see what the gateway does and why, and to change its course."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from gateway.api import admin_events as events
from gateway.api import admin_slo, admin_tenants
from gateway.api.admin_access import NEEDS_TOKEN, Guard, address_of
from gateway.api.admin_settings import ChangeRefused, change_schema, read_change, shown_settings
from gateway.api.admin_state import gateway_state
from gateway.api.audit import Operator
from gateway.api.configuration import Difference
from gateway.api.errors import error_body
from gateway.config_reading import ConfigError
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Priority

if TYPE_CHECKING:
    from gateway.api.app import Gateway

CHANGE_BYTES_MAX = 64 * 1024

NOT_A_CHANGE: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is no JSON object; nothing has changed"},
    413: {"description": "The body is too large; nothing has changed"},
    415: {"description": "The body is not announced as application/json; nothing has changed"},
}
WRONG: dict[int | str, dict[str, Any]] = {
    422: {"description": "It is wrong, and the answer says what; nothing has changed"}
}
_ODD_BODY: dict[int | str, dict[str, Any]] = {415: {"description": "A body that is not JSON"}}

ClassName = Literal["P0", "P1", "P2"]
ChangeKind = Literal["rates", "upstream", "settings", "reload", "drain"]
Limit = Annotated[int, Query(ge=1, le=1000)]


class SettingsResult(BaseModel):
    """Names of settings that are others now, of those that stay as they were until a restart, and, if there
    are any, of those that had been set at run time and are as in the configuration again."""

    changed: list[str]
    needs_restart: list[str]
    overrides: list[str] | None = None

    @classmethod
    def of(cls, found: Difference) -> "SettingsResult":
        return cls(
            changed=list(found.changed),
            needs_restart=list(found.needs_restart),
            overrides=list(found.overrides) or None,
        )


class SettingAsRead(BaseModel):
    """A setting that operators have changed."""

    configured: Any
    now: Any


class SettingsNow(BaseModel):
    """What may be changed at run time, as it is now, and what of it is not as it was last read."""

    settings: dict[str, Any]
    set_at_run_time: dict[str, SettingAsRead]


class DrainResult(BaseModel):
    """Requests still at the engines."""

    draining: bool
    in_flight: int


def add_admin(app: FastAPI, gateway: "Gateway", guard: Guard) -> None:
    _add_looks(app, gateway, guard)
    _add_changes(app, gateway, guard)


def _add_looks(app: FastAPI, gateway: "Gateway", guard: Guard) -> None:
    edge, reads = gateway.edge, [Depends(guard.reads)]

    @app.get(
        "/admin/state",
        dependencies=reads,
        summary="Budgets, queues and places now",
        responses=NEEDS_TOKEN,
    )
    async def state() -> JSONResponse:
        return JSONResponse(gateway_state(gateway))

    @app.get(
        "/admin/tenants",
        dependencies=reads,
        summary="Who waits and runs, and has what left",
        response_model=admin_tenants.Tenants,
        responses=NEEDS_TOKEN,
    )
    async def tenants(limit: Limit = 100) -> Response:
        edge.gate.advance()
        keys = {} if gateway.keys is None else gateway.keys.by_tenant
        page = await admin_tenants.tenants(edge.admission, keys, limit)
        return Response(msgspec.json.encode(page), media_type="application/json")

    @app.get("/admin/slo", dependencies=reads, summary="How well each class is served", responses=NEEDS_TOKEN)
    async def slo() -> admin_slo.Promises:
        return admin_slo.promises(edge.admission, gateway.recent, edge.clock.now())

    @app.get(
        "/admin/changes",
        dependencies=reads,
        summary="What changed and why: rates, engines, settings",
        responses=NEEDS_TOKEN,
    )
    async def changes(limit: Limit = 50, kind: ChangeKind | None = None) -> events.Changes:
        """At most `limit` of each kind."""
        return events.changes(gateway.recent, gateway.trail, kind, limit, edge.clock.now())

    @app.get(
        "/admin/decisions", dependencies=reads, summary="The last requests that ended", responses=NEEDS_TOKEN
    )
    async def decisions(
        limit: Limit = 50, priority: ClassName | None = None, outcome: Outcome | None = None
    ) -> events.Decisions:
        """The newest 200 of each class are kept; never a prompt, never a key."""
        endings = gateway.recent.endings(PRIORITIES if priority is None else [Priority[priority]])
        wanted = (ended for ended in endings if outcome is None or ended.outcome is outcome)
        return events.decisions(islice(wanted, limit), edge.clock.now())

    @app.get(
        "/admin/history",
        dependencies=reads,
        summary="The last five minutes, by the second",
        responses=NEEDS_TOKEN,
    )
    async def history(after: Annotated[int, Query(ge=0)] = 0) -> events.Past:
        return events.past(gateway.history, after, edge.clock.now())

    @app.get(
        "/admin/settings",
        dependencies=reads,
        summary="The settings that may be changed at run time",
        responses=NEEDS_TOKEN,
    )
    async def settings() -> SettingsNow:
        changed = gateway.set_at_run_time().values
        return SettingsNow(
            settings=shown_settings(gateway.settings),
            set_at_run_time={
                name: SettingAsRead(configured=old, now=new) for name, (old, new) in changed.items()
            },
        )


def _add_changes(app: FastAPI, gateway: "Gateway", guard: Guard) -> None:
    changes = [Depends(guard.changes)]
    schema = {
        "schema": change_schema(),
        "example": {"classes": {"P0": {"share": 0.7}, "P1": {"share": 0.25}}},
    }

    @app.patch(
        "/admin/settings",
        dependencies=changes,
        summary="Change settings until the next reload",
        response_model=SettingsResult,
        response_model_exclude_none=True,
        responses={**NOT_A_CHANGE, **WRONG, **NEEDS_TOKEN},
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": schema}}},
    )
    async def change_settings(request: Request, x_operator: str | None = Header(default=None)) -> Any:
        """A part of a configuration, in JSON; what it does not name stays. Upstreams go by their names. It is
        checked as a configuration file is, and taken over as a whole or not at all. Files stay as they are:
        the next reload or restart brings back what they say."""
        if "content-type" not in request.headers:
            raise HTTPException(415, "content-type: expected application/json")
        body = await _body(request)
        try:
            change = read_change(body)
        except ChangeRefused as refused:
            return _refusal(400, "invalid_json", refused)
        try:
            found = await gateway.change_settings(change, _operator(request, x_operator))
        except ConfigError as refused:
            return _refusal(422, "invalid_setting", refused)
        return SettingsResult.of(found)

    @app.post(
        "/admin/reload",
        dependencies=changes,
        summary="Read the configuration again",
        response_model=SettingsResult,
        response_model_exclude_none=True,
        responses={**_ODD_BODY, **WRONG, **NEEDS_TOKEN},
    )
    async def reload_configuration(request: Request, x_operator: str | None = Header(default=None)) -> Any:
        """Answers when all of it is in force, and what was set at run time is not. One that is wrong changes
        nothing, and the answer says why."""
        try:
            found = await gateway.reload(_operator(request, x_operator))
        except ConfigError as refused:
            return _refusal(422, "invalid_configuration", refused)
        return SettingsResult.of(found)

    @app.post(
        "/admin/drain",
        dependencies=changes,
        summary="Take no more requests",
        responses={**_ODD_BODY, **NEEDS_TOKEN},
    )
    async def drain(request: Request, x_operator: str | None = Header(default=None)) -> DrainResult:
        """As at a SIGTERM: `/readyz` says 503, what waits and what comes is refused with 503, streams go on.
        But the process stays, and no stream is broken off. There is no way back but a restart."""
        gateway.take_no_more(_operator(request, x_operator))
        admission = gateway.edge.admission
        in_flight = sum(slots.in_flight_total for slots in admission.at_work)
        return DrainResult(draining=admission.draining, in_flight=in_flight)


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > CHANGE_BYTES_MAX:
            raise HTTPException(413, f"the body is too large: at most {CHANGE_BYTES_MAX} bytes")
    return body


def _operator(request: Request, name: str | None) -> Operator:
    return Operator(address_of(request), name)


def _refusal(status: int, code: str, refused: ConfigError) -> Response:
    param = refused.param if isinstance(refused, ChangeRefused) else None
    body = error_body(str(refused), "invalid_request_error", param, code)
    return Response(body, status, None, "application/json")
