"""The decision log: one JSON line for each thing the policy was told or decided, enough to replay it.

`event` says what a line is:

* `configuration`, at the top of each file: the version, the settings as the policy has them and since when,
  and the wall clock beside the policy's own, so that one file alone can be read. Once more where the settings
  change. `run` tells one process from another.
* `request`, one for each request, when it ends, also for one that was refused at the door: the facts (`ask`),
  the pool as it was at its arrival (`seen`), what was decided, what came of it.
* `rates`, `health`, `trial`, `load`, `queue_full`: what else changed. Each reading of an engine's page has
  its line, even if it says the same as before: with its age the policy's own counts since then begin anew.

Times of the policy's clock end in `_ns`: nanoseconds from an origin of its own, as long as they are not
durations. Lists by class are in the order P0, P1, P2. Never a prompt, never a key: of a key its id.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import msgspec

from gateway.policy.clock import Clock
from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Observer, RatesChanged, RequestEnded, Seen, SeenUpstream
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Ask, Priority, Usage
from gateway.telemetry.labels import REQUEST_ID_LENGTH_MAX, clean
from gateway.telemetry.log_output import LogOutput
from gateway.telemetry.log_setup import Stamp
from gateway.telemetry.rotating_file import RotatingFile

Write = Callable[[str], None]
Line = dict[str, Any]

_CLASS_NAMES = [p.name for p in PRIORITIES]

_WITH_UNITS = {
    "arrived_at": "arrived_at_ns",
    "ended_at": "ended_at_ns",
    "requeued_at": "requeued_at_ns",
    "estimated_cost": "estimated_cost_millitokens",
    "charged": "charged_millitokens",
    "throttled": "throttled_requests",
    "ready": "ready_requests",
    "in_flight": "in_flight_requests",
    "waiting": "waiting_requests",
}


def _names(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_WITH_UNITS.get(field, field) for field in fields)


_REQUEST = _names(RequestEnded._fields)
_SEEN = _names(Seen._fields)
_SEEN_UPSTREAM = _names(SeenUpstream._fields)
_SAID_OUTSIDE = ("request_id", "priority", "tenant", "model", "streaming")
"""Fields of an ask that its request's line has already."""
_ASK = tuple(name for name in Ask._fields if name not in _SAID_OUTSIDE)

_encode = msgspec.json.Encoder().encode


class DecisionLog(Observer):
    """`write` gets each line, without its line feed."""

    wants_details = True

    def __init__(self, write: Write, stamp: Stamp | None = None) -> None:
        self._write = write
        self._stamp = stamp or Stamp()

    def ended(self, event: RequestEnded) -> None:
        line = self._line("request")
        line.update(zip(_REQUEST, event, strict=True))
        line["request_id"] = clean(event.request_id, REQUEST_ID_LENGTH_MAX)
        line["priority"] = _CLASS_NAMES[event.priority]
        line["tenant"] = clean(event.tenant)
        line["model"] = clean(event.model)
        line["usage"] = None if event.usage is None else _usage(event.usage)
        line["ask"] = None if event.ask is None else _ask(event.ask)
        line["seen"] = None if event.seen is None else _seen(event.seen)
        line["order"] = None if event.order is None else event.order._asdict()
        self._write(_json(line))

    def rates_changed(self, event: RatesChanged) -> None:
        line = self._line("rates")
        line["at_ns"] = event.at
        line["law"] = event.law
        line["reason"] = event.reason
        line["direction"] = event.direction
        line["old_rates_millitokens_per_second"] = event.old_rates
        line["new_rates_millitokens_per_second"] = event.new_rates
        line["inputs"] = event.inputs
        line["upstreams"] = event.upstreams
        line["order"] = event.order
        line["applied"] = event.applied
        self._write(_json(line))

    def health_changed(self, upstream: str, healthy: bool, at: int) -> None:
        line = self._line("health")
        line.update(at_ns=at, upstream=upstream, healthy=healthy)
        self._write(_json(line))

    def trial_allowed(self, upstream: str, at: int) -> None:
        line = self._line("trial")
        line.update(at_ns=at, upstream=upstream)
        self._write(_json(line))

    def load_told(self, upstream: str, load: EngineLoad, at: int) -> None:
        line = self._line("load")
        line.update(at_ns=at, upstream=upstream)
        line.update(
            running_requests=load.running,
            waiting_requests=load.waiting,
            kv_usage=load.kv_usage,
            kv_tokens=load.kv_tokens,
        )
        self._write(_json(line))

    def queue_full(self, upstream: str, at: int) -> None:
        line = self._line("queue_full")
        line.update(at_ns=at, upstream=upstream)
        self._write(_json(line))

    def _line(self, event: str) -> Line:
        return {"ts": self._stamp(None, "", {})["ts"], "event": event}


class Configuration:
    """The settings in force, as a line: the same for all files of this process until others are taken."""

    def __init__(
        self,
        parameters: PolicyParameters,
        clock: Clock,
        version: str,
        wall_clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock = clock
        self._version = version
        self._wall_clock_ns = wall_clock_ns
        self._stamp = Stamp(wall_clock_ns)
        self._run = secrets.token_hex(8)
        self.take(parameters, clock.now())

    def take(self, parameters: PolicyParameters, at: int) -> None:
        """In force from then on."""
        self._in_force = plain_parameters(parameters), at

    def line(self) -> str:
        parameters, since = self._in_force
        return _json(
            {
                "ts": self._stamp(None, "", {})["ts"],
                "event": "configuration",
                "version": self._version,
                "run": self._run,
                "at_ns": self._clock.now(),
                "wall_time_ns": self._wall_clock_ns(),
                "since_ns": since,
                "parameters": parameters,
            }
        )


class DecisionLogFile(DecisionLog):
    """Written by a thread of its own. To be made right before the policy it listens to, and closed when
    nothing more will come."""

    def __init__(self, path: Path, *, max_bytes: int, files: int, configuration: Configuration) -> None:
        """Opens the file. Raises OSError."""
        self._configuration = configuration
        self._file = RotatingFile(path, max_bytes, files, configuration.line)
        self._output = LogOutput(cast(TextIO, self._file))
        super().__init__(self._output.write)

    def reconfigured(self, parameters: PolicyParameters, at: int) -> None:
        self._configuration.take(parameters, at)
        self._write(self._configuration.line())

    def close(self) -> None:
        self._output.close()
        self._file.close()


def plain_parameters(parameters: PolicyParameters) -> dict[str, Any]:
    """As JSON has it: classes by name, and the names of tenants and models as the other lines spell them."""
    tree: dict[str, Any] = msgspec.to_builtins(parameters)
    tree["classes"] = _by_name(tree["classes"])
    tree["scheduling"]["skip_limit"] = _by_name(tree["scheduling"]["skip_limit"])
    for upstream in tree["upstreams"]:
        upstream["models"] = [model if model == "*" else clean(model) for model in upstream["models"]]
    for names in ("tenants", "key_max_in_flight"):
        tree[names] = {clean(name): limits for name, limits in tree[names].items()}
    return tree


def _by_name(classes: Mapping[int, Any]) -> dict[str, Any]:
    return {Priority(p).name: value for p, value in classes.items()}


def _ask(ask: Ask) -> Line:
    line = {name: getattr(ask, name) for name in _ASK}
    if ask.claimed is not None:
        line["claimed"] = _CLASS_NAMES[ask.claimed]
    if ask.key is not None:
        line["key"] = clean(ask.key)
    if ask.fairness_id is not None:
        line["fairness_id"] = clean(ask.fairness_id)
    return line


def _usage(usage: Usage) -> Line:
    return {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _seen(seen: Seen) -> Line:
    line: Line = dict(zip(_SEEN, seen, strict=True))
    line["upstreams"] = [dict(zip(_SEEN_UPSTREAM, upstream, strict=True)) for upstream in seen.upstreams]
    return line


def _json(line: Line) -> str:
    try:
        return _encode(line).decode()
    except OverflowError:  # a number beyond 64 bits
        return json.dumps(line)
