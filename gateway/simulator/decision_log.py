"""Reads a decision log back: the settings, and everything that was told or decided under them.

A log may be in several files (`decisions.jsonl.1` is older than `decisions.jsonl`) and hold several runs of a
gateway. What is read are the policy's own records; the names of tenants and models are those of the log,
with odd characters replaced.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Order, RatesChanged, RequestEnded, Seen, SeenUpstream
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Ask, Priority, Usage

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HealthChanged:
    upstream: str
    healthy: bool
    at: int


@dataclass(frozen=True, slots=True)
class TrialAllowed:
    upstream: str
    at: int


@dataclass(frozen=True, slots=True)
class LoadTold:
    upstream: str
    load: EngineLoad
    at: int


@dataclass(frozen=True, slots=True)
class QueueFull:
    upstream: str
    at: int


@dataclass(frozen=True, slots=True)
class Reconfigured:
    parameters: PolicyParameters
    at: int


Event = RequestEnded | RatesChanged | HealthChanged | TrialAllowed | LoadTold | QueueFull | Reconfigured


@dataclass
class LoggedRun:
    """One process's part of a log. Times are nanoseconds of its policy's clock."""

    run: str
    version: str
    parameters: PolicyParameters
    """Those that were in force first."""
    began_at: int
    """When these came into force: if nothing is missing, when the gateway was started."""
    wall_time_ns: int
    """What the wall clock said at `began_at`, nanoseconds since 1970."""
    events: list[Event] = field(default_factory=list)
    """In the order of the lines, which is that of the happenings; for requests that of their ends."""
    lost_lines: int = 0
    """Lines that could not be written, at most."""

    @property
    def requests(self) -> list[RequestEnded]:
        return [event for event in self.events if isinstance(event, RequestEnded)]


def read_decision_log(*paths: Path) -> list[LoggedRun]:
    """The runs in these files, the oldest file first. ValueError naming the line that makes no sense.

    Kinds of line that are not known are passed over; so is what a process left of its last line when it was
    killed.
    """
    runs: dict[str, LoggedRun] = {}
    run: LoggedRun | None = None
    in_force: PolicyParameters | None = None
    for place, line in _lines(paths):
        try:
            if line["event"] == "configuration":
                parameters = _parameters(line["parameters"])
                run = runs.get(line["run"])
                if run is None:
                    run = runs[line["run"]] = _new_run(line, parameters)
                elif parameters != in_force:
                    run.events.append(Reconfigured(parameters, line["since_ns"]))
                in_force = parameters
            elif run is None:
                raise ValueError("there is no configuration above it")
            else:
                _take(line, run)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error!r}") from error
    return list(runs.values())


def with_older(path: Path) -> list[Path]:
    """A log with those before it, the oldest first."""
    numbered = [p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit()]
    return [*sorted(numbered, key=lambda p: -int(p.suffix[1:])), path]


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, Line]]:
    """Each line with the words for where it stands."""
    for path in paths:
        broken = ""
        with path.open(encoding="utf-8", newline="\n") as file:
            for number, text in enumerate(file, start=1):
                place = f"{path}, line {number}"
                try:
                    line = json.loads(text)
                except ValueError:
                    if broken:
                        raise ValueError(f"{broken}: no JSON") from None
                    broken = place
                    continue
                if broken and line.get("event") != "configuration":
                    raise ValueError(f"{broken}: no JSON")
                broken = ""
                yield place, line


def _new_run(line: Line, parameters: PolicyParameters) -> LoggedRun:
    began_at = line["since_ns"]
    wall = line["wall_time_ns"] - (line["at_ns"] - began_at)
    return LoggedRun(line["run"], line["version"], parameters, began_at, wall)


def _parameters(tree: dict[str, Any]) -> PolicyParameters:
    tree["classes"] = _by_class(tree["classes"])
    tree["scheduling"]["skip_limit"] = _by_class(tree["scheduling"]["skip_limit"])
    return msgspec.convert(tree, PolicyParameters)


def _by_class(values: Mapping[str, Any]) -> dict[int, Any]:
    return {int(Priority[name]): value for name, value in values.items()}


# ---------------------------------------------------------------------- lines


def _take(line: Line, run: LoggedRun) -> None:
    kind = line["event"]
    if kind == "log lines dropped":
        run.lost_lines += line["count"]
    elif kind in _READERS:
        run.events.append(_READERS[kind](line))


def _request(line: Line) -> RequestEnded:
    usage, ask, seen, order = line["usage"], line["ask"], line["seen"], line["order"]
    would_be = line["would_be"]
    return RequestEnded(
        request_id=line["request_id"],
        priority=Priority[line["priority"]],
        tenant=line["tenant"],
        model=line["model"],
        outcome=Outcome(line["outcome"]),
        streaming=line["streaming"],
        upstream=line["upstream"],
        arrived_at=line["arrived_at_ns"],
        ended_at=line["ended_at_ns"],
        queue_wait_ns=line["queue_wait_ns"],
        ttft_ns=line["ttft_ns"],
        upstream_ttft_ns=line["upstream_ttft_ns"],
        tpot_ns=line["tpot_ns"],
        max_gap_ns=line["max_gap_ns"],
        usage=None if usage is None else Usage(**usage),
        estimated_cost=line["estimated_cost_millitokens"],
        charged=line["charged_millitokens"],
        promoted=line["promoted"],
        by_tenant_limit=line["by_tenant_limit"],
        would_be=None if would_be is None else Outcome(would_be),
        requeued_at=line["requeued_at_ns"],
        not_reached=line["not_reached"],
        ask=None if ask is None else _ask(line, ask),
        seen=None if seen is None else _seen(seen),
        order=None if order is None else Order(**order),
    )


def _ask(line: Line, ask: Line) -> Ask:
    claimed = ask["claimed"]
    return Ask(
        request_id=line["request_id"],
        priority=Priority[line["priority"]],
        tenant=line["tenant"],
        model=line["model"],
        streaming=line["streaming"],
        input_tokens=ask["input_tokens"],
        max_output_tokens=ask["max_output_tokens"],
        sequences=ask["sequences"],
        prompts=ask["prompts"],
        body_bytes=ask["body_bytes"],
        client_timeout_ns=ask["client_timeout_ns"],
        key=ask["key"],
        fairness_id=ask["fairness_id"],
        claimed=None if claimed is None else Priority[claimed],
    )


def _seen(seen: Line) -> Seen:
    return Seen(
        bucket_tokens=tuple(seen["bucket_tokens"]),
        rates_tokens_per_second=tuple(seen["rates_tokens_per_second"]),
        throttled=tuple(seen["throttled_requests"]),
        ready=tuple(seen["ready_requests"]),
        upstreams=tuple(
            SeenUpstream(
                name=upstream["name"],
                healthy=upstream["healthy"],
                in_flight=tuple(upstream["in_flight_requests"]),
                in_flight_tokens=upstream["in_flight_tokens"],
                pending_prefill_tokens=upstream["pending_prefill_tokens"],
                waiting=upstream["waiting_requests"],
                kv_usage=upstream["kv_usage"],
            )
            for upstream in seen["upstreams"]
        ),
    )


def _rates(line: Line) -> RatesChanged:
    return RatesChanged(
        at=line["at_ns"],
        law=line["law"],
        reason=line["reason"],
        direction=line["direction"],
        old_rates=tuple(line["old_rates_millitokens_per_second"]),
        new_rates=tuple(line["new_rates_millitokens_per_second"]),
        inputs=line["inputs"],
        upstreams=tuple(line["upstreams"]),
        order=line["order"],
        applied=line["applied"],
    )


def _health(line: Line) -> HealthChanged:
    return HealthChanged(line["upstream"], line["healthy"], line["at_ns"])


def _trial(line: Line) -> TrialAllowed:
    return TrialAllowed(line["upstream"], line["at_ns"])


def _load(line: Line) -> LoadTold:
    load = EngineLoad(line["running_requests"], line["waiting_requests"], line["kv_usage"], line["kv_tokens"])
    return LoadTold(line["upstream"], load, line["at_ns"])


def _queue_full(line: Line) -> QueueFull:
    return QueueFull(line["upstream"], line["at_ns"])


_READERS: dict[str, Any] = {
    "request": _request,
    "rates": _rates,
    "health": _health,
    "trial": _trial,
    "load": _load,
    "queue_full": _queue_full,
}
