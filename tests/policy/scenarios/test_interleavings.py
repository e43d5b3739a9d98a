"""Any interleaving of what can happen, checked after every step against what must hold always."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.policy.clock import NEVER
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority, Stage, Ticket
from gateway.policy.token_bucket import UNITS_PER_TOKEN
from tests.support.bucket_oracle import SECOND, ExactBuckets
from tests.support.drivers import (
    DRIVERS,
    AsyncioDriver,
    Driver,
    VirtualDriver,
    assert_quiet,
    assert_same_decisions,
)
from tests.support.policy_settings import P0, P1, P2, policy, upstream

HOLDBACK = {P0: 1.0, P1: 0.9, P2: 0.6}
SKIP_LIMIT = {P1: 2, P2: 4}
CEILINGS = {P0: 1.0, P1: 1.0, P2: 0.5}
TAIL_NS = 5 * SECOND

CLASSES: dict[Priority, dict[str, Any]] = {
    p: {
        "holdback": HOLDBACK[p],
        "ceiling_share": CEILINGS[p],
        "wait": {P0: 1, P1: 4, P2: 9}[p],
        "throttle": {P0: 0.5, P1: 3, P2: 9}[p],
        "max_queued_requests": 6,
        "max_queued_bytes": 500,
    }
    for p in PRIORITIES
}
TIGHT = {"burst_seconds": 0.5, "min_burst_tokens": 200, "max_debt_seconds": 2.0}

PLACES_ALONE = policy(
    upstream("a", max_in_flight=3, tokens_per_second=600),
    upstream("b", max_in_flight=2, tokens_per_second=400),
    classes=CLASSES,
    capacity=TIGHT,
    scheduling={"skip_limit": SKIP_LIMIT},
    no_upstream_seconds=2,
)
EVERYTHING = policy(
    upstream(
        "a", models=("m",), max_in_flight=4, max_in_flight_tokens=500, tokens_per_second=600, accepts="short"
    ),
    upstream("b", models=("m",), max_in_flight=3, max_in_flight_tokens=700, tokens_per_second=400),
    upstream("other", models=("x",), max_in_flight=2, tokens_per_second=500),
    classes=CLASSES,
    capacity={**TIGHT, "initial_output_tokens": 5, "output_weight": 2.0},
    scheduling={
        "skip_limit": SKIP_LIMIT,
        "long_prompt_tokens": 120,
        "max_pending_prefill_tokens": 100,
        "long_prompt_duty": 0.3,
    },
    no_upstream_seconds=2,
)


@dataclass(frozen=True)
class Step:
    wait_ns: int
    what: str
    which: int = 0
    priority: Priority = P1
    tenant: str = "t"
    tokens: int = 1
    size: int = 0
    streaming: bool = True
    model: str = "m"
    flag: bool = True


waits = st.sampled_from(
    [0, 0, 0, 1, 1_000_000, 7_000_000, 7_000_000, 50_000_000, 50_000_000, 333_333_333, SECOND]
)
some = st.integers(0, 11)
submits = st.builds(
    Step,
    waits,
    st.just("submit"),
    priority=st.sampled_from(PRIORITIES),
    tenant=st.sampled_from("uvw"),
    tokens=st.sampled_from([1, 1, 1, 5, 5, 20, 20, 60, 121, 200, 450]),
    size=st.sampled_from([0, 0, 10, 10, 200, 600]),
    streaming=st.booleans(),
    model=st.sampled_from(["m", "m", "m", "x"]),
)
finishes = st.builds(
    Step, waits, st.just("finish"), which=some, tokens=st.sampled_from([0, 1, 1, 20, 300, 2000])
)
others = st.one_of(
    st.builds(Step, waits, st.just("fail"), which=some),
    st.builds(Step, waits, st.just("first"), which=some),
    st.builds(Step, waits, st.just("cancel"), which=some),
    st.builds(Step, waits, st.just("health"), which=some, flag=st.sampled_from([True, True, False])),
    st.builds(Step, waits, st.just("nothing")),
)
steps = st.lists(st.one_of(submits, submits, finishes, others), min_size=35, max_size=90)


def with_stage(driver: Driver, *stages: Stage) -> list[str]:
    return [name for name, t in driver.tickets.items() if t.stage in stages]


def act(driver: Driver, step: Step, number: int) -> None:
    """Do one step; which request is meant is found among those it can apply to."""
    if step.what == "submit":
        model = step.model if driver.admission.serves("x") and len(driver.admission.pools) > 1 else "m"
        driver.submit(
            f"r{number}",
            step.priority,
            step.tokens,
            tenant=step.tenant,
            body_bytes=step.size,
            streaming=step.streaming,
            model=model,
        )
    elif step.what == "health":
        names = [u.name for u in driver.admission.parameters.upstreams]
        driver.health(names[step.which % len(names)], step.flag)
    elif step.what == "cancel":
        if names := with_stage(driver, Stage.THROTTLED, Stage.READY):
            driver.cancel(names[step.which % len(names)])
    elif step.what != "nothing" and (names := with_stage(driver, Stage.DISPATCHED)):
        name = names[step.which % len(names)]
        if step.what == "first":
            driver.first_token(name)
        elif step.what == "finish":
            driver.finish(name, step.tokens)
        else:
            driver.finish(name, -1, outcome=Outcome.UPSTREAM_REFUSED)


def book(driver: Driver, run: list[Step], look: Callable[[], None] | None = None) -> float:
    """Book all steps, then one end for everybody; answers when that is, in seconds. `look` is called before
    and after each step."""
    at = 0
    for number, step in enumerate(run):
        at += step.wait_ns

        def one(step: Step = step, number: int = number) -> None:
            driver.admission.advance()
            driver_settle(driver)
            if look is not None:
                look()
            act(driver, step, number)
            if look is not None:
                look()

        driver.at(at, one)
    driver.at(at, lambda: end_all(driver))
    return at / SECOND


def driver_settle(driver: Driver) -> None:
    """Hand out what the advance decided."""
    if isinstance(driver, VirtualDriver):
        driver.gate.settle()
    elif isinstance(driver, AsyncioDriver):
        driver.gate._settle()


def end_all(driver: Driver) -> None:
    while names := with_stage(driver, Stage.THROTTLED, Stage.READY, Stage.DISPATCHED):
        for name in names:
            driver.cancel(name)
            driver.finish(name, 1)


class Watch:
    """What must hold after every step, and the buckets once more in exact arithmetic."""

    def __init__(self, driver: VirtualDriver, places_alone: bool) -> None:
        self.driver = driver
        self.places_alone = places_alone
        self.seen = 0  # decisions looked at
        self.since_promotion = [{P1: 10**6, P2: 10**6} for _ in driver.admission.pools]
        self.in_flight: dict[str, set[str]] = {u.name: set() for u in driver.admission.parameters.upstreams}
        self.gone: set[str] = set()
        self.twins = [BucketTwin(driver, pool) for pool in driver.admission.pools]

    def __call__(self) -> None:
        self.decisions()
        self.limits()
        self.waiting()
        for twin in self.twins:
            twin.compare()
        assert self.driver.admission.next_deadline() > self.driver.clock.now()

    def decisions(self) -> None:
        """No lower class goes while a paid higher one could, but for promotions."""
        driver, now = self.driver, self.driver.clock.now()
        for name, t in driver.tickets.items():
            if t.stage is Stage.ENDED:
                for there in self.in_flight.values():
                    there.discard(name)
        for position in range(self.seen, len(driver.log)):
            at, name, what = driver.log[position]
            if not what.startswith(("dispatched", "promoted")):
                continue
            ticket = driver.tickets[name]
            where = self.in_flight[ticket.upstream.name]
            since = self.since_promotion[driver.admission.pools.index(ticket.pool)]
            for p in since:
                since[p] += 1
            if what.startswith("promoted"):
                assert since[ticket.priority] > SKIP_LIMIT[ticket.priority]
                since[ticket.priority] = 0
            elif self.places_alone and at == now:
                limit = ticket.upstream.max_in_flight
                assert len(where) < max(ceil(HOLDBACK[ticket.priority] * limit), 1)
                for other in self.could_have_gone(ticket, position):
                    raise AssertionError(f"{ticket} went before {other}")
            where.add(name)
        self.seen = len(driver.log)

    def could_have_gone(self, ticket: Ticket, position: int) -> list[Ticket]:
        """Paid before this instant, of a higher class, and still waiting when the ticket went."""
        now = self.driver.clock.now()
        later = {name for _, name, _ in self.driver.log[position + 1 :]}
        return [
            t
            for name, t in self.driver.tickets.items()
            if t.priority < ticket.priority
            and t.paid_at is not None
            and t.paid_at < now
            and (t.stage is Stage.READY or (t.stage is Stage.DISPATCHED and name in later))
        ]

    def limits(self) -> None:
        for pool in self.driver.admission.pools:
            for slots in pool.slots:
                assert slots.in_flight_total == sum(slots.in_flight) <= slots.max_in_flight
                if slots.max_in_flight_tokens is not None:
                    alone = slots.in_flight_total == 1
                    assert slots.in_flight_tokens <= slots.max_in_flight_tokens or alone
                assert 0 <= slots.long_prefills <= 1
                running = [
                    t
                    for t in self.driver.tickets.values()
                    if t.stage is Stage.DISPATCHED and t.upstream is slots
                ]
                assert len(running) == slots.in_flight_total
                assert sum(t.total_tokens for t in running) == slots.in_flight_tokens
                assert sum(t.input_tokens for t in running if t.prefilling) == slots.pending_prefill_tokens

    def waiting(self) -> None:
        now = self.driver.clock.now()
        for pool in self.driver.admission.pools:
            waiting = [t for t in pool.room.tickets() if t.stage in (Stage.THROTTLED, Stage.READY)]
            for p in PRIORITIES:
                mine = [t for t in waiting if t.priority is p]
                assert pool.depth(p) == len(mine) <= 6
                assert pool.queued_bytes[p] == sum(t.ask.body_bytes for t in mine) <= 500
            for t in waiting:
                assert t.deadline > now
                if t.stage is Stage.READY:
                    assert t.charged == t.cost
                else:
                    assert t.charged == 0
            if self.places_alone and any(t.stage is Stage.READY and t.priority is P0 for t in waiting):
                for slots in pool.slots:
                    assert not slots.healthy or slots.in_flight_total == slots.max_in_flight


class BucketTwin:
    """Listens to the charges of one pool and repeats them exactly."""

    def __init__(self, driver: VirtualDriver, pool: Any) -> None:
        self.driver, self.pool, self.buckets = driver, pool, pool.buckets
        parameters = driver.admission.parameters
        self.exact = ExactBuckets(
            [Fraction(r, 1000) for r in self.buckets.rates],
            [Fraction(CEILINGS[p]) for p in PRIORITIES],
            Fraction(parameters.capacity.burst_seconds),
            Fraction(parameters.capacity.min_burst_tokens),
            grain=Fraction(1, 10**12),
        )
        self.take, self.settle, self.set_rates = (
            self.buckets.take,
            self.buckets.settle,
            self.buckets.set_rates,
        )
        self.buckets.take = self._take
        self.buckets.settle = self._settle
        self.buckets.set_rates = self._set_rates
        self.settling = False

    def serves(self, model: str) -> bool:
        return any({model, "*"} & set(slots.parameters.models) for slots in self.pool.slots)

    def catch_up(self) -> None:
        self.exact.run(self.driver.clock.now())

    def _take(self, priority: Priority, cost: int, own_share: bool) -> int:
        if not self.settling:
            self.catch_up()
            self.exact.take(priority, Fraction(cost, 1000), own_share)
        return int(self.take(priority, cost, own_share))

    def _settle(self, priority: Priority, charged: int, actual: int, own_share: bool, own_units: int) -> int:
        self.catch_up()
        self.settling = True
        stays = int(self.settle(priority, charged, actual, own_share, own_units))
        self.settling = False
        if stays <= charged:
            of_own = Fraction(own_units, UNITS_PER_TOKEN)
            self.exact.give_back(priority, Fraction(charged - stays, 1000), of_own)
        else:
            self.exact.take(priority, Fraction(stays - charged, 1000), own_share)
        return stays

    def _set_rates(self, rates: list[int], now: int) -> None:
        self.catch_up()
        self.set_rates(rates, now)
        self.exact.set_rates([Fraction(r, 1000) for r in rates])

    def arriving(self, priority: Priority) -> None:
        self.catch_up()
        self.exact.busy_until[priority] = NEVER

    def ended(self, event: RequestEnded) -> None:
        """Active are classes with work, and those whose last request ended less than five seconds ago."""
        p = event.priority
        left = [
            t
            for t in self.driver.tickets.values()
            if t.pool is self.pool and t.priority is p and t.stage is not Stage.ENDED
        ]
        if not left:
            self.exact.busy_until[p] = event.ended_at + TAIL_NS

    def compare(self) -> None:
        self.catch_up()
        self.buckets.advance(self.driver.clock.now())
        for p in PRIORITIES:
            assert self.buckets.levels[p] <= self.buckets.bursts[p]
            assert self.buckets.own_levels[p] <= self.buckets.levels[p]
            assert self.buckets.level_tokens(p) == pytest.approx(float(self.exact.levels[p]), abs=2e-3)
            own = self.buckets.own_levels[p] / UNITS_PER_TOKEN
            assert own == pytest.approx(float(self.exact.own[p]), abs=2e-3)


def watched(parameters: PolicyParameters, run: list[Step], places_alone: bool) -> VirtualDriver:
    driver = VirtualDriver(parameters)
    watch = Watch(driver, places_alone)
    submit, ended = driver.submit, driver.endings.ended

    def twin_of(model: str) -> BucketTwin:
        return next(t for t in watch.twins if t.serves(model))

    def submit_told(name: str, priority: Priority, tokens: int = 1, **given: Any) -> Ticket:
        twin_of(given["model"]).arriving(priority)
        return submit(name, priority, tokens, **given)

    def ended_told(event: RequestEnded) -> None:
        ended(event)
        twin_of(event.model).ended(event)

    driver.submit = submit_told  # type: ignore[method-assign]
    driver.endings.ended = ended_told  # type: ignore[method-assign]
    over = book(driver, run, watch)
    driver.run(over + 20)
    finished(driver, run)
    for twin in watch.twins:
        twin.compare()
    return driver


def finished(driver: Driver, run: list[Step]) -> None:
    """Everything has ended once, every gauge reads 0, nobody waited past its time."""
    assert_quiet(driver)
    offered = sum(s.what == "submit" for s in run)
    records = driver.endings.records
    assert len(records) == len(driver.tickets) == offered
    assert len({r.request_id for r in records}) == offered
    promoted = sum(what.startswith("promoted") for _, _, what in driver.log)
    assert len(driver.endings.promotions) == promoted == sum(r.promoted for r in records)
    for record in records:
        ticket = driver.tickets[record.request_id]
        assert ticket.stage is Stage.ENDED
        if record.outcome is Outcome.QUEUE_TIMEOUT:
            assert record.ended_at == ticket.deadline
        if record.queue_wait_ns is not None:
            assert record.arrived_at + record.queue_wait_ns <= ticket.deadline
        else:
            assert record.charged == 0
            assert record.ended_at <= ticket.deadline
        if record.outcome is Outcome.UPSTREAM_REFUSED:
            assert record.charged == 0


BOUNDED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@BOUNDED
@given(steps)
def test_places_and_order(run: list[Step]) -> None:
    """Over any interleaving, with places the only limit: strict order but promotions, exact buckets."""
    watched(PLACES_ALONE, run, places_alone=True)


@BOUNDED
@given(steps)
def test_all_limits_together(run: list[Step]) -> None:
    """Over any interleaving with every kind of limit: none is exceeded, all is given back."""
    watched(EVERYTHING, run, places_alone=False)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.sampled_from([PLACES_ALONE, EVERYTHING]))
def test_both_drivers_decide_the_same(run: list[Step], parameters: PolicyParameters) -> None:
    """Any interleaving is decided in the same way at the same instants on virtual time and under asyncio."""
    drivers = [kind(parameters) for kind in DRIVERS]
    try:
        for driver in drivers:
            over = book(driver, run)
            driver.run(over + 20)
            finished(driver, run)
        assert_same_decisions(drivers[0].log, drivers[1].log)
    finally:
        for driver in drivers:
            driver.close()


def dense(seed: int) -> list[Step]:
    """Five hundred steps of a busy gateway: every class asks more than it gets, engines come and go."""
    chance = random.Random(seed)
    run = []
    for _ in range(500):
        wait = chance.choice([0, 1, 999_983, 20_000_000, 40_000_000, 60_000_000, 100_000_000])
        what = chance.choices(
            ["submit", "finish", "fail", "first", "cancel", "health", "nothing"], [50, 32, 2, 8, 2, 1, 5]
        )[0]
        run.append(
            Step(
                wait,
                what,
                chance.randrange(12),
                chance.choice(PRIORITIES),
                chance.choice("uvw"),
                chance.choice([1, 1, 5, 20] if what == "finish" else [1, 1, 1, 5, 20, 60, 121, 200, 450]),
                chance.choice([0, 10, 100, 600] if chance.random() < 0.1 else [0, 10]),
                chance.random() < 0.7,
                chance.choice("mmmx"),
                chance.random() < 0.8,
            )
        )
    return run


@pytest.mark.parametrize("parameters", [PLACES_ALONE, EVERYTHING], ids=["places alone", "everything"])
def test_a_busy_gateway(parameters: PolicyParameters) -> None:
    """Long busy runs keep every rule, decide the same under both drivers, and meet every kind of decision."""
    met: set[str] = set()
    for seed in range(3):
        run = dense(seed)
        one = watched(parameters, run, parameters is PLACES_ALONE)
        other = AsyncioDriver(parameters)
        try:
            other.run(book(other, run) + 20)
            finished(other, run)
            assert_same_decisions(one.log, other.log)
        finally:
            other.close()
        met |= {what.split("@")[0] for _, _, what in one.log}
    assert met >= {
        "dispatched",
        "promoted",
        "client_gone_queued",
        "queue_timeout",
        "rejected_queue_full",
        "rejected_rate",
    }
