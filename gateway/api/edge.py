"""What all exchanges share: the policy's gate, the engines, the rules of the door, and the listeners."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import structlog

from gateway.api.access import Access
from gateway.api.endpoints import Endpoint
from gateway.api.engine_call import shows_service
from gateway.api.errors import Problem
from gateway.api.headers import Header, duration
from gateway.api.prompt_reader import PromptReader
from gateway.api.request_body import BodyLimits
from gateway.policy.admission import Admission
from gateway.policy.classification import ClassificationRules
from gateway.policy.clock import Clock
from gateway.policy.events import Observer
from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Refusal
from gateway.runtime.admission_gate import AdmissionGate, Permit
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.tracing import Tracing
from gateway.upstream.circuit_breaker import Admittance
from gateway.upstream.client import Upstream
from gateway.upstream.engines import Engines, Key
from gateway.upstream.retry_budget import RetryBudget

if TYPE_CHECKING:
    from gateway.api.exchange import Exchange

_log = structlog.get_logger("gateway")


@dataclass
class Edge:
    clock: Clock
    gate: AdmissionGate
    engines: Engines
    retries: RetryBudget
    prompt_reader: PromptReader
    metrics: Metrics
    request_log: RequestLog
    observer: Observer
    tracing: Tracing | None
    random: Callable[[], float]
    # What the door goes by; a reload puts others in their place.
    access: Access = field(init=False)
    rules: ClassificationRules = field(init=False)
    priority_headers: frozenset[bytes] = field(init=False)
    door_headers: frozenset[bytes] = field(init=False)
    """All that the door looks at in a request's head."""
    body_limits: BodyLimits = field(init=False)
    probe_seconds: float = field(init=False)
    """How soon an engine that is down can be known to be back."""
    endpoints: Mapping[str, Endpoint] = field(init=False)
    """By path."""
    active: set["Exchange"] = field(default_factory=set)

    def __post_init__(self) -> None:
        process = secrets.token_hex(6)
        self._ids = (f"{process}-{number:x}" for number in count(1))

    @property
    def admission(self) -> Admission:
        return self.gate.admission

    # ------------------------------------------------------------------ names

    def new_request_id(self) -> str:
        return "req-" + next(self._ids)

    def upstream_request_id(self, given: str | None, request_id: str) -> bytes:
        """Unique even when two clients give the same id: engines take it for the request's identity."""
        return (request_id if given is None else f"{given}-{next(self._ids)}").encode()

    # ------------------------------------------------------------------ engines

    def usable_upstreams(self, wanted: Callable[[Upstream], bool] = lambda _: True) -> list[Upstream]:
        """The healthy ones of those wanted; only where there are none, those on trial. Were these left out, a
        gateway with one engine would say that it is not ready, and no trial request would come."""
        found = [(e.health.admits, e.upstream) for e in self.engines if wanted(e.upstream)]
        healthy = [upstream for admits, upstream in found if admits is Admittance.ALL]
        return healthy or [upstream for admits, upstream in found if admits is Admittance.TRIAL]

    def is_heard(self, engine: Key, since: int) -> bool:
        """Whether anything of an answer has come from there since then (ns)."""
        answered = self.engines.of(engine).health.served_at >= since
        return answered or any(exchange.turn.is_heard(engine, since) for exchange in self.active)

    def may_go_elsewhere(self, permit: Permit) -> bool:
        """Whether a request whose engine was not reached may try another one. A yes is paid for."""
        return self.admission.may_go_elsewhere(permit.ticket) and self.retries.take()

    def first_token(self, permit: Permit) -> None:
        permit.first_token()
        sent_at = permit.ticket.dispatched_at
        if sent_at is not None:
            self.engines.of(permit.engine).health.request_began(sent_at)

    def ended_at_engine(self, permit: Permit, outcome: Outcome, status: int | None) -> None:
        """What a request shows of its engine, which is to be known before its place is free for another.
        `status` is the engine's."""
        health, sent_at = self.engines.of(permit.engine).health, permit.ticket.dispatched_at
        serves = shows_service(outcome, status)
        if sent_at is None or serves is None:
            return
        if serves:
            health.request_succeeded(sent_at)
        else:
            health.request_failed(sent_at, outcome if status is None else f"{outcome}, status {status}")

    # ------------------------------------------------------------------ the policy's words

    def problem_of(self, refusal: Refusal, priority: Priority) -> Problem:
        """The policy's no, as the client gets it."""
        return Problem.of_refusal(refusal, priority, self.probe_seconds)

    def rate_limit_headers(self, priority: Priority, model: str, tenant: str) -> list[Header]:
        """`x-ratelimit-*` of the limit that binds: the tenant's own where it has one, else the class's."""
        standing = self.admission.standing(priority, model, tenant)
        headers = [
            (b"x-ratelimit-limit-tokens", b"%d" % standing.limit_tokens),
            (b"x-ratelimit-remaining-tokens", b"%d" % standing.remaining_tokens),
            (b"x-ratelimit-reset-tokens", duration(standing.full_after_ns)),
        ]
        if standing.limit_requests is not None:
            headers += (
                (b"x-ratelimit-limit-requests", b"%d" % standing.limit_requests),
                (b"x-ratelimit-remaining-requests", b"%d" % (standing.remaining_requests or 0)),
                (b"x-ratelimit-reset-requests", duration(standing.requests_after_ns)),
            )
        return headers

    # ------------------------------------------------------------------ records

    def ended_at_the_door(self, exchange: "Exchange", outcome: Outcome) -> None:
        """One record for a request that the policy never saw."""
        self.observer.ended(
            ended_at_the_door(
                exchange.request_id,
                outcome,
                exchange.arrived_at,
                self.clock.now(),
                priority=exchange.priority,
                tenant=exchange.tenant,
            )
        )

    def log_internal_error(self, request_id: str) -> None:
        _log.error("internal error", request_id=request_id, exc_info=True)
