"""A noisy neighbour does not hurt the others of its class, and those who all want more get the same.

Short runs of `make noisy-neighbour`, whose longer ones have the figures."""

from collections.abc import Callable
from functools import cache

import pytest

from gateway.policy.request import Priority
from gateway.simulator.report import jain_index
from tests.benchmarks.noisy_neighbour import render
from tests.support.noisy_neighbour import (
    NINE,
    NOISY,
    SCENARIOS,
    TEN,
    Job,
    Service,
    backlogged,
    compare,
    run,
    total,
    with_noisy,
    without_noisy,
    workload,
)

SEED = 2
SECONDS = 90.0

done = cache(lambda kind, name, seed: run(kind_of(kind, name, seed)))


def kind_of(kind: Callable[..., Job], name: str, seed: int) -> Job:
    if kind is backlogged:
        return backlogged(name, seed, SECONDS)
    return kind(name, SCENARIOS[name].about_tokens_per_second / len(TEN), seed, SECONDS)


def nine(services: dict[str, Service]) -> Service:
    return total([services[tenant] for tenant in NINE])


@pytest.mark.parametrize("binding", ["c", "slots"])
def test_the_nine_are_served_as_without_the_noisy_one(binding: str) -> None:
    """Beside one that asks for ten times as much, nine below their fair share keep 95 % of their service,
    whether tokens or places run short; and the noisy one gets what is left, over its own share."""
    noisy, quiet = done(with_noisy, binding, SEED), done(without_noisy, binding, SEED)
    assert noisy[NOISY].completed < 0.6 * noisy[NOISY].offered, "nothing runs short"
    assert nine(noisy).offered == nine(quiet).offered
    assert nine(noisy).completed >= 0.95 * nine(quiet).completed
    assert nine(noisy).tokens >= 0.95 * nine(quiet).tokens
    assert noisy[NOISY].tokens > 1.5 * nine(noisy).tokens / len(NINE)


@pytest.mark.parametrize("binding", ["c", "c-mixed", "slots"])
def test_tenants_that_all_want_more_get_the_same(binding: str) -> None:
    """All ten backlogged, the weighted service is equal, whatever the size of their requests."""
    services = done(backlogged, binding, SEED)
    assert all(service.completed < 0.9 * service.offered for service in services.values())
    assert jain_index([services[tenant].tokens for tenant in TEN]) >= 0.98


def test_those_that_come_back_are_served_in_the_end() -> None:
    """A request of the nine that was refused and comes back when it was told to is served."""
    noisy, quiet = done(with_noisy, "c-retried", SEED), done(without_noisy, "c-retried", SEED)
    assert nine(noisy).completed >= 0.99 * nine(quiet).completed
    assert nine(noisy).offered > nine(quiet).offered, "none had to come back"


@pytest.mark.parametrize("name", ["c-mixed", "own-share", "c-retried"])
def test_what_the_nine_ask_does_not_depend_on_the_tenth(name: str) -> None:
    """With and without it they send the same requests at the same times."""

    def asked(job: Job) -> list[object]:
        load = workload(job)
        return [s for s in (*load.open, *load.closed) if s.caller.tenant != NOISY]

    assert asked(kind_of(with_noisy, name, SEED)) == asked(kind_of(without_noisy, name, SEED))


def test_the_report() -> None:
    """A line for each scenario in each of three tables, the same for the same seeds."""
    texts = [
        render(compare(["c"], [1, 2], 21.0, lambda work, jobs: [work(job) for job in jobs])) for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert sum(line.split()[:1] == ["C"] for line in texts[0].splitlines()) == 3


# ---------------------------------------------------------------------- the index


@pytest.mark.parametrize(
    ("amounts", "index"),
    [([7, 7, 7], 1.0), ([5], 1.0), ([9, 0, 0, 0], 0.25), ([1, 2, 3], 36 / 42), ([0, 0], 1.0)],
)
def test_jains_index(amounts: list[float], index: float) -> None:
    """1 when all have the same, 1/n when one has all, whatever the unit."""
    assert jain_index(amounts) == pytest.approx(index)
    assert jain_index([1000 * amount for amount in amounts]) == pytest.approx(index)


def test_the_scenarios_bind_what_they_say() -> None:
    """The defaults are the gateway's: P1's 35 %, its wait limit, and 128 places."""
    parameters = SCENARIOS["c"].parameters
    assert parameters.classes[Priority.P1].share == 0.35
    assert (
        parameters.upstreams[0].max_in_flight
        == SCENARIOS["slots"].parameters.upstreams[0].max_in_flight
        == 128
    )
