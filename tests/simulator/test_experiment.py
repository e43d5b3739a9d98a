"""Runs on virtual time: repeatable, complete, and true to the engine's arithmetic."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.mock_backend.gpu_model import PRESETS, GpuPreset
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from gateway.policy.token_cost import usage_millitokens
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.experiment import Experiment, Run
from gateway.simulator.report import make_report, render
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Caller,
    ClosedStream,
    EvenStream,
    FixedLengths,
    Lengths,
    PoissonStream,
    Workload,
)
from tests.support.drivers import assert_quiet

P0, P1, P2 = Priority
DEFAULTS = policy_parameters(Settings())
SEED_32K = PRESETS["seed_32k"]

CROWD = Workload(
    open=tuple(PoissonStream(Caller(p, "o"), 3.0, CHAT_LENGTHS) for p in (P0, P1)),
    closed=(
        ClosedStream(Caller(P2, "c"), 6, FixedLengths(Lengths(900, 60))),
        ClosedStream(
            Caller(P2, "d", max_output_tokens=40), 2, FixedLengths(Lengths(9000, 40)), think_seconds=1
        ),
    ),
)
"""More than the engine can serve."""


def run(
    workload: Workload,
    *,
    parameters: PolicyParameters = DEFAULTS,
    seed: int = 1,
    seconds: float = 60.0,
    **given: Any,
) -> Run:
    presets = {upstream.name: SEED_32K for upstream in parameters.upstreams}
    return Experiment(workload, parameters, presets, seed=seed, seconds=seconds, **given).run()


def one(lengths: Lengths, caller: Caller | None = None, requests: int = 1, every: float = 1.0) -> Workload:
    return Workload(
        open=(EvenStream(caller or Caller(P1, "t"), every, FixedLengths(lengths), requests=requests),)
    )


def iteration_ns(preset: GpuPreset, prefill: int, decoding: int, kv: int) -> int:
    return preset.iteration_ns(prefill, 0.0, decoding, kv)


# ---------------------------------------------------------------------- repeatable and complete


@pytest.mark.parametrize("gateway", [True, False])
def test_same_seed_same_report_byte_for_byte(gateway: bool) -> None:
    """Another seed gives another one."""

    def report(seed: int) -> str:
        outcome = run(CROWD, seed=seed, seconds=20, gateway=gateway)
        return render([make_report("run", outcome.records, DEFAULTS, 20)])

    assert report(1) == report(1)
    assert report(1) != report(2)


def test_every_request_ends_once_and_nothing_is_left_taken() -> None:
    """Under overload, with refusals of several kinds: all places, queues and bytes are given back."""
    few_places = replace(DEFAULTS, upstreams=(replace(DEFAULTS.upstreams[0], max_in_flight=6),))
    outcome = run(CROWD, parameters=few_places, seconds=60)
    ids = Counter(record.request_id for record in outcome.records)
    assert set(ids.values()) == {1}
    assert len({record.outcome for record in outcome.records}) > 2
    assert_quiet(cast(Any, SimpleNamespace(admission=outcome.admission)))


def test_what_is_charged_is_what_was_used() -> None:
    """To the thousandth of a token after settlement; who was refused has paid nothing."""
    for record in run(CROWD, seconds=60).records:
        if record.usage is None:
            assert record.charged == 0
        else:
            weight = DEFAULTS.classes[record.priority].weight
            assert record.charged == usage_millitokens(weight, record.usage, DEFAULTS.capacity)


def test_nobody_arrives_after_the_end() -> None:
    """What has begun by then is seen to its end."""
    records = run(CROWD, seconds=10).records
    assert max(record.arrived_at for record in records) < 10 * NANOSECONDS_PER_SECOND
    assert max(record.ended_at for record in records) > 10 * NANOSECONDS_PER_SECOND


# ---------------------------------------------------------------------- times


@pytest.mark.parametrize("gateway", [True, False])
def test_a_lone_request_takes_what_the_engine_takes(gateway: bool) -> None:
    """One prefill, then decodes over a context that grows by one; the gateway takes no time of its own."""
    (record,) = run(one(Lengths(100, 4)), gateway=gateway).records
    decodes = [iteration_ns(SEED_32K, 0, 1, context) for context in (100, 101, 102)]
    assert record.outcome is Outcome.COMPLETED
    assert record.ttft_ns == record.upstream_ttft_ns == iteration_ns(SEED_32K, 100, 0, 0)
    assert record.tpot_ns == sum(decodes) // 3
    assert record.max_gap_ns == max(decodes)
    assert record.ended_at == record.ttft_ns + sum(decodes)
    assert record.usage is not None
    assert (record.usage.input_tokens, record.usage.output_tokens) == (100, 4)


def test_one_token_has_neither_gap_nor_time_per_token() -> None:
    (record,) = run(one(Lengths(100, 1))).records
    assert record.ttft_ns is not None
    assert record.tpot_ns is record.max_gap_ns is None


def test_requests_of_one_instant_share_an_iteration() -> None:
    """The engine begins when all that come just then are there."""
    streams = tuple(EvenStream(Caller(P0, t), 1.0, FixedLengths(Lengths(100, 1)), requests=1) for t in "ab")
    records = run(Workload(open=streams)).records
    assert {record.ttft_ns for record in records} == {iteration_ns(SEED_32K, 200, 0, 0)}


def test_every_token_can_be_watched() -> None:
    seen: list[tuple[int, int]] = []
    run(one(Lengths(10, 5), requests=2), watch=lambda request, now: seen.append((request.number, now)))
    assert Counter(number for number, _ in seen) == {1: 5, 2: 5}
    assert [now for _, now in seen] == sorted(now for _, now in seen)


# ---------------------------------------------------------------------- what the policy knows


def test_the_policy_does_not_know_how_long_an_answer_will_be() -> None:
    """It reserves by what the client says and what it has seen, whatever the engine is about to do."""

    def estimated(output_tokens: int, said: int | None = None) -> int:
        (record,) = run(one(Lengths(50, output_tokens), Caller(P1, "t", max_output_tokens=said))).records
        return record.estimated_cost

    assert estimated(1) == estimated(900) == 1000 * (50 + 4 * 256)
    assert estimated(1, said=100) == 1000 * (50 + 4 * 100)


def test_an_answer_sent_whole_has_no_first_token() -> None:
    (record,) = run(one(Lengths(50, 5), Caller(P1, "t", streaming=False))).records
    assert record.outcome is Outcome.COMPLETED
    assert record.ttft_ns is record.tpot_ns is None


def test_what_can_never_be_served_ends_too() -> None:
    """Too long for the gateway's limit, or too long for the engine behind none."""
    too_long = Lengths(140_000, 5)
    assert [r.outcome for r in run(one(too_long)).records] == [Outcome.BAD_REQUEST]
    assert [r.outcome for r in run(one(too_long), gateway=False).records] == [Outcome.UPSTREAM_ERROR]
    no_limit = replace(DEFAULTS, capacity=replace(DEFAULTS.capacity, max_request_tokens=None))
    outcome = run(one(too_long), parameters=no_limit)
    assert [(r.outcome, r.charged) for r in outcome.records] == [(Outcome.UPSTREAM_ERROR, 0)]
    assert_quiet(cast(Any, SimpleNamespace(admission=outcome.admission)))


# ---------------------------------------------------------------------- clients and engines


def test_a_client_of_a_closed_stream_has_one_request_at_a_time() -> None:
    """Answered it thinks and asks again; refused it comes back when it was told to."""
    clients = tuple(
        ClosedStream(Caller(P2, f"client {n}"), 1, FixedLengths(Lengths(32_768, 20)), think_seconds=0.5)
        for n in range(4)
    )
    always = PoissonStream(Caller(P0, "busy"), 1.0, FixedLengths(Lengths(100, 50)))
    records = run(Workload(open=(always,), closed=clients), seconds=300).records
    refused = 0
    for stream in clients:
        own = sorted((r for r in records if r.tenant == stream.caller.tenant), key=lambda r: r.arrived_at)
        for earlier, later in pairwise(own):
            pause = (later.arrived_at - earlier.ended_at) / NANOSECONDS_PER_SECOND
            if earlier.outcome is Outcome.COMPLETED:
                assert pause == 0.5
            else:
                refused += 1
                assert earlier.outcome is Outcome.REJECTED_RATE
                assert 30 < pause <= 60
    assert refused > 4


def test_without_a_gateway_the_least_loaded_engine_is_taken() -> None:
    upstream = DEFAULTS.upstreams[0]
    two = replace(DEFAULTS, upstreams=(upstream, replace(upstream, name="gpu1")))
    records = run(one(Lengths(5000, 5), requests=4, every=0.01), parameters=two, gateway=False).records
    assert Counter(record.upstream for record in records) == {"gpu0": 2, "gpu1": 2}


def test_through_the_gateway_all_engines_are_used() -> None:
    upstream = DEFAULTS.upstreams[0]
    two = replace(DEFAULTS, upstreams=(upstream, replace(upstream, name="gpu1")))
    records: list[RequestEnded] = run(CROWD, parameters=two, seconds=10).records
    used = Counter(record.upstream for record in records if record.outcome is Outcome.COMPLETED)
    assert min(used["gpu0"], used["gpu1"]) > 5
