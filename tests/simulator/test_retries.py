"""Clients that come back as the OpenAI SDKs do."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from gateway.simulator.experiment import Experiment, Run
from gateway.simulator.workload import (
    Caller,
    ClosedStream,
    EvenStream,
    FixedLengths,
    Lengths,
    Workload,
    sdk_retry_ns,
)
from tests.simulator.test_experiment import DEFAULTS, SEED_32K

P0, P1, P2 = Priority
SECOND = NANOSECONDS_PER_SECOND
LENGTHS = FixedLengths(Lengths(500, 5))
NOTHING_PASSES = replace(
    DEFAULTS, classes={**DEFAULTS.classes, P1: replace(DEFAULTS.classes[P1], max_queued_requests=0)}
)
"""Whoever cannot go at once is refused, and is told to come back."""
FULL = replace(NOTHING_PASSES, upstreams=(replace(DEFAULTS.upstreams[0], max_in_flight=1),))


def run(workload: Workload, parameters: PolicyParameters = FULL, seconds: float = 30.0) -> Run:
    return Experiment(workload, parameters, {"gpu0": SEED_32K}, seed=1, seconds=seconds).run()


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize(
    ("outcome", "advice_seconds", "returns"),
    [
        (Outcome.REJECTED_RATE, 2.0, True),
        (Outcome.QUEUE_TIMEOUT, None, True),
        (Outcome.REJECTED_NO_UPSTREAM, None, True),
        (Outcome.REJECTED_RATE, None, False),
        (Outcome.REJECTED_RATE, 61.0, False),
        (Outcome.BAD_REQUEST, None, False),
        (Outcome.UPSTREAM_ERROR, None, False),
    ],
)
def test_which_endings_are_tried_again(outcome: Outcome, advice_seconds: float | None, returns: bool) -> None:
    """Refusals, unless the wait is beyond what the gateway calls worth it."""
    advice = None if advice_seconds is None else round(advice_seconds * SECOND)
    assert (sdk_retry_ns(outcome, advice, Random(1)) is not None) == returns


def test_a_retry_comes_when_the_answer_says() -> None:
    """At the advised time or up to 40 % later."""
    waits = [sdk_retry_ns(Outcome.REJECTED_RATE, 5 * SECOND, Random(seed)) for seed in range(50)]
    assert all(wait is not None and 5 * SECOND <= wait <= 7 * SECOND for wait in waits)


# ---------------------------------------------------------------------- who


def test_a_refused_request_of_an_open_stream_comes_back() -> None:
    """The same prompt, so many times at most; each time it is one more request offered."""
    burst = EvenStream(Caller(P1, "t"), 0.001, LENGTHS, requests=40)
    never, twice = run(Workload(open=(burst,))), run(Workload(open=(burst,), retries=2))
    assert len(never.records) == 40
    assert never.retries == []
    assert len(twice.records) == 40 + len(twice.retries)
    assert set(twice.retries) == {P1}
    served = [sum(r.outcome is Outcome.COMPLETED for r in each.records) for each in (never, twice)]
    assert served[1] > served[0]
    refused = len(twice.records) - served[1]
    assert refused <= 3 * (40 - served[1]) + len(twice.retries)


def test_nobody_comes_back_more_often_than_it_may() -> None:
    """40 requests that are always refused are offered three times each."""
    nothing = replace(FULL, upstreams=(replace(DEFAULTS.upstreams[0], max_in_flight=0),))
    burst = EvenStream(Caller(P1, "t"), 0.001, LENGTHS, requests=40)
    records = run(Workload(open=(burst,), retries=2), nothing, seconds=300).records
    assert len(records) == 120


def test_a_client_gives_up_and_asks_something_else() -> None:
    """After its retries it thinks, as after an answer."""
    nothing = replace(FULL, upstreams=(replace(DEFAULTS.upstreams[0], max_in_flight=0),))
    client = ClosedStream(Caller(P1, "t"), 1, LENGTHS, think_seconds=50.0, retries=1)
    records = run(Workload(closed=(client,)), nothing, seconds=100).records
    times = [record.arrived_at / SECOND for record in records]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert [gap > 49 for gap in gaps[:3]] == [False, True, False]


def test_the_same_seed_retries_at_the_same_times() -> None:
    burst = EvenStream(Caller(P1, "t"), 0.001, LENGTHS, requests=40)
    one, other = (run(Workload(open=(burst,), retries=2)).records for _ in range(2))
    assert one == other
    assert Counter(record.outcome for record in one)[Outcome.COMPLETED] > 0
