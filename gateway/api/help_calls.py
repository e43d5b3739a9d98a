"""What needs neither budget nor place: tokens of a text, an operator's extra paths, the list of models."""

import asyncio
from typing import TYPE_CHECKING

from gateway.api.access import Caller
from gateway.api.engine_call import read_all
from gateway.api.engine_turn import ERROR_ANSWER_BYTES_MAX, EngineTurn
from gateway.api.errors import Problem
from gateway.api.models import check_is_served, check_may_use, merged_models
from gateway.api.reply import Reply
from gateway.policy.admission import NOTHING_DELIVERED, Delivered
from gateway.policy.outcome import Outcome
from gateway.upstream.client import Upstream

if TYPE_CHECKING:
    from gateway.api.edge import Edge


async def pass_on(
    edge: "Edge", turn: EngineTurn, caller: Caller, model: str, method: str, body: bytes
) -> tuple[Outcome, Delivered]:
    """Ask the least busy engine at once; `model` is empty where the request names none."""
    if model:
        check_may_use(caller, model)
        check_is_served(model, edge.admission)
    engine = engine_for(edge, caller, model)
    return await turn.untouched(engine, b"POST" if method == "POST" else b"GET", body)  # HEAD is cut here


def engine_for(edge: "Edge", caller: Caller, model: str) -> Upstream:
    """The least busy of the usable engines that serve the model; without one, of those that serve any the
    caller may use. Raises Problem (503) when none is up."""
    found = edge.usable_upstreams(lambda upstream: _serves(upstream, caller, model))
    if not found:
        raise Problem(
            Outcome.REJECTED_NO_UPSTREAM, "no engine for this is up", retry_seconds=edge.probe_seconds
        )
    return min(found, key=lambda upstream: edge.admission.upstream(upstream.name).in_flight_tokens)


def _serves(upstream: Upstream, caller: Caller, model: str) -> bool:
    served = upstream.address.models
    if "*" in served:
        return True
    return model in served if model else any(map(caller.may_use, served))


async def list_models(
    edge: "Edge", turn: EngineTurn, reply: Reply, caller: Caller
) -> tuple[Outcome, Delivered]:
    """Untouched where there is one engine and the key may use all it has, else put together."""
    upstreams = edge.usable_upstreams()
    if not upstreams:
        raise Problem(Outcome.REJECTED_NO_UPSTREAM, "no engine is up")
    if len(upstreams) == 1 and "*" in caller.models:
        return await turn.untouched(upstreams[0], b"GET")
    pages = await asyncio.gather(*(_model_page(turn, upstream) for upstream in upstreams))
    await reply.whole(200, [(b"content-type", b"application/json")], merged_models(pages, caller))
    return Outcome.COMPLETED, NOTHING_DELIVERED


async def _model_page(turn: EngineTurn, upstream: Upstream) -> bytes:
    """An engine's list; empty where it has none to give."""
    try:
        return await read_all(await turn.ask(upstream, b"GET"), ERROR_ANSWER_BYTES_MAX)
    except Problem:
        return b""
