"""Which engine is asked what needs neither budget nor place: tokens of a text, an operator's extra paths."""

from gateway.api.access import Caller
from gateway.api.edge import Edge
from gateway.api.errors import Problem
from gateway.policy.outcome import Outcome
from gateway.upstream.client import Upstream


def engine_for(edge: Edge, caller: Caller, model: str | None) -> Upstream:
    """The least busy of the usable engines that serve the model; without one, of those that serve any the
    caller may use. Raises Problem (503) when none is up."""
    found = edge.usable_upstreams(lambda upstream: _serves(upstream, caller, model))
    if not found:
        raise Problem(
            Outcome.REJECTED_NO_UPSTREAM, "no engine for this is up", retry_seconds=edge.probe_seconds
        )
    return min(found, key=lambda upstream: edge.admission.upstream(upstream.name).in_flight_tokens)


def _serves(upstream: Upstream, caller: Caller, model: str | None) -> bool:
    served = upstream.address.models
    if "*" in served:
        return True
    return model in served if model is not None else any(map(caller.may_use, served))
