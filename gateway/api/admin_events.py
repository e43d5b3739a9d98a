"""What happened lately, for `/admin/changes`, `/admin/decisions` and `/admin/history`.

Times are given twice: by the clock, and as seconds ago, which needs no clock that agrees with this one.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.api.audit import Action
from gateway.policy.clock import NANOSECONDS_PER_SECOND, to_seconds
from gateway.policy.events import RatesChanged, RequestEnded
from gateway.policy.parameters import MILLITOKENS
from gateway.telemetry.endings import milliseconds, queue_wait_ns
from gateway.telemetry.history import INTERVAL_SECONDS, History, Sample
from gateway.telemetry.labels import REQUEST_ID_LENGTH_MAX, clean
from gateway.telemetry.recent import Recent, UpstreamChanged


class _Wall:
    """Times of the policy's clock on the wall's, as both are now."""

    def __init__(self, now: int) -> None:
        self._now = now
        self._wall_ns = time.time_ns()

    def ts(self, at: int) -> str:
        seconds = (self._wall_ns - (self._now - at)) / NANOSECONDS_PER_SECOND
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def ago(self, at: int) -> float:
        return to_seconds(self._now - at)


# ── changes ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Change:
    """`kind` is `rates` (a control law, or what it reacts to), `upstream` (an engine went or came), or what
    an operator did: `settings`, `reload`, `drain`. `what` holds the rest, by kind."""

    ts: str
    seconds_ago: float
    kind: str
    what: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """The newest first, of each kind so many: a law that acts every second hides nobody's doing."""

    changes: list[Change]


def changes(recent: Recent, trail: Iterable[Action], kind: str | None, limit: int, now: int) -> Changes:
    found = [
        *((change.at, "rates", _rates(change)) for change in recent.rate_changes),
        *((change.at, "upstream", _upstream(change)) for change in recent.upstream_changes),
        *((action.at, action.kind, _action(action)) for action in trail),
    ]
    found.sort(key=lambda each: each[0], reverse=True)
    room = Counter(dict.fromkeys({of for _, of, _ in found} if kind is None else {kind}, limit))
    when = _Wall(now)
    shown = []
    for at, of, what in found:
        if room[of]:
            room[of] -= 1
            shown.append(Change(when.ts(at), when.ago(at), of, what))
    return Changes(shown)


def _rates(change: RatesChanged) -> dict[str, Any]:
    return {
        "law": change.law,
        "reason": change.reason,
        "direction": change.direction,
        "applied": change.applied,
        "old_rates_tokens_per_second": [rate / MILLITOKENS for rate in change.old_rates],
        "new_rates_tokens_per_second": [rate / MILLITOKENS for rate in change.new_rates],
        "inputs": change.inputs,
        "upstreams": list(change.upstreams),
    }


def _upstream(change: UpstreamChanged) -> dict[str, Any]:
    return {"upstream": change.upstream, "state": change.state}


def _action(action: Action) -> dict[str, Any]:
    return {
        "by": action.by.address,
        "operator": action.by.name,
        "done": action.done,
        "reason": action.reason,
        "values": {name: {"old": old, "new": new} for name, (old, new) in action.values.items()},
    }


# ── endings ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Decision:
    """One request, as it ended. Milliseconds; null where it does not apply."""

    ts: str
    seconds_ago: float
    request_id: str
    tenant: str
    model: str
    priority: str
    outcome: str
    streaming: bool
    upstream: str | None
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    max_gap_ms: float | None
    duration_ms: float
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    estimated_cost_tokens: float
    cost_tokens: float
    promoted: bool
    by_tenant_limit: bool
    would_be: str | None


@dataclass(frozen=True, slots=True)
class Decisions:
    """The newest first."""

    decisions: list[Decision]


def decisions(events: Iterable[RequestEnded], now: int) -> Decisions:
    when = _Wall(now)
    return Decisions([_decision(event, when) for event in events])


def _decision(event: RequestEnded, when: _Wall) -> Decision:
    usage = event.usage
    return Decision(
        ts=when.ts(event.ended_at),
        seconds_ago=when.ago(event.ended_at),
        request_id=clean(event.request_id, REQUEST_ID_LENGTH_MAX),
        tenant=clean(event.tenant),
        model=clean(event.model),
        priority=event.priority.name,
        outcome=event.outcome.value,
        streaming=event.streaming,
        upstream=event.upstream,
        queue_ms=milliseconds(queue_wait_ns(event)),
        ttft_ms=milliseconds(event.ttft_ns),
        tpot_ms=milliseconds(event.tpot_ns),
        max_gap_ms=milliseconds(event.max_gap_ns),
        duration_ms=(event.ended_at - event.arrived_at) / 1_000_000,
        input_tokens=None if usage is None else usage.input_tokens,
        cached_tokens=None if usage is None else usage.cached_tokens,
        output_tokens=None if usage is None else usage.output_tokens,
        estimated_cost_tokens=event.estimated_cost / MILLITOKENS,
        cost_tokens=event.charged / MILLITOKENS,
        promoted=event.promoted,
        by_tenant_limit=event.by_tenant_limit,
        would_be=None if event.would_be is None else event.would_be.value,
    )


# ── history ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Past:
    """Samples, oldest first. Ask again with the last one's `number` as `after`."""

    interval_seconds: float
    samples: list[dict[str, Any]]


def past(history: History, after: int, now: int) -> Past:
    return Past(INTERVAL_SECONDS, [_sample(sample, now) for sample in history.after(after)])


def _sample(sample: Sample, now: int) -> dict[str, Any]:
    figures = asdict(sample)
    figures["seconds_ago"] = to_seconds(now - figures.pop("at"))
    return figures
