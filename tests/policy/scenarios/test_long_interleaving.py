"""A long life of a gateway in one run: everything that can happen, in random order, with other settings on
the way, and after every step all that must hold.

The number of steps can be set: `LONG_INTERLEAVING_STEPS=100000 pytest …/test_long_interleaving.py`.
"""

import os
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

from gateway.policy.admission import Delivered, RequestTooLong
from gateway.policy.engine_load import EngineLoad
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES, Stage, Ticket, Usage
from tests.support.drivers import AsyncioDriver, Driver, VirtualDriver, assert_same_decisions
from tests.support.policy_audit import Audit
from tests.support.policy_settings import P1, P2, policy, upstream

STEPS = int(os.environ.get("LONG_INTERLEAVING_STEPS", "10000"))
UPSTREAMS = {"a": ("m",), "b": ("m",), "c": ("m",), "other": ("x",)}

NANOSECONDS = [0, 0, 1, 999_983, 2_000_000, 5_000_000, 5_000_000, 10_000_000, 33_333_333]
LENGTHS = [1, 1, 1, 1, 5, 5, 20, 20, 60, 121, 200, 450]


def any_upstreams(chance: random.Random) -> dict[str, tuple[str, ...]]:
    """What each serves: mostly as usual, sometimes one more or less, or with other models."""
    told = dict(UPSTREAMS)
    if chance.random() < 0.5:
        return told
    for name in chance.sample([*UPSTREAMS, "new"], chance.choice([1, 2, 4])):
        told[name] = chance.choice([("m",), ("x",), ("y",), ("m", "x"), ("*",)])
    for name in chance.sample(list(told), chance.choice([0, 1, len(told) - 1])):
        del told[name]
    return told


def quite_other_upstreams(chance: random.Random) -> dict[str, tuple[str, ...]]:
    names = chance.sample("abcdef", chance.randint(2, 5))
    return {name: tuple(chance.sample("mxy", chance.choice([1, 1, 2, 3]))) for name in names} | (
        {names[0]: ("*",)} if chance.random() < 0.2 else {}
    )


def any_settings(
    chance: random.Random,
    upstreams: Callable[[random.Random], dict[str, tuple[str, ...]]] = any_upstreams,
) -> PolicyParameters:
    """Some legal settings, every limit tight enough to be met."""
    pick = chance.choice
    shares = pick([(0.6, 0.35, 0.05), (0.6, 0.35, 0.05), (0.4, 0.3, 0.3), (0.7, 0.3, 0.0)])
    classes = {
        p: {
            "share": shares[p],
            "ceiling_share": pick([1.0, 1.0, 0.5]),
            "weight": pick([1.0, 1.0, 1.0, 0.5, 2.0]),
            "throttle": pick([0.0, 0.5, 3, 9, 9]),
            "wait": pick([0.5, 2, 9, 9]),
            "max_queued_requests": pick([0, 3, 6, 12, 12]),
            "max_queued_bytes": pick([None, 100, 500]),
            "holdback": pick([1.0, 1.0, 0.9, 0.6]),
            "ttft": pick([None, 1.0, 9.0]),
            "observe": chance.random() < 0.15,
        }
        for p in PRIORITIES
    }
    return policy(
        *(
            upstream(
                name,
                models=models,
                address=pick(["", "", "", "", "elsewhere"]),
                max_in_flight=pick([0, 2, 3, 4, 6, 6, None]),
                max_in_flight_tokens=pick([None, None, 300, 700]),
                tokens_per_second=pick([300, 1000, 4000]),
                accepts=pick(["any", "any", "any", "short", "long"]),
                waiting_high=pick([0, 2, 4]),
                kv_high=pick([0.5, 0.9]),
                load_stale_ns=pick([50_000_000, 500_000_000]),
            )
            for name, models in upstreams(chance).items()
        ),
        classes=classes,
        capacity={
            "burst_seconds": pick([0.1, 0.5, 0.5]),
            "min_burst_tokens": pick([0, 200]),
            "initial_output_tokens": pick([0, 5, 50]),
            "output_weight": pick([0.0, 1.0, 4.0]),
            "max_debt_seconds": pick([0.0, 0.5, 2.0]),
            "max_request_tokens": pick([None, 300]),
        },
        scheduling={
            "skip_limit": {P1: pick([1, 2, 5]), P2: pick([2, 4, 19])},
            "long_prompt_tokens": pick([100, 120, 10**6]),
            "long_prompt_lane": pick([1, 1, 2]),
            "long_prompt_duty": pick([0.04, 0.3, 1.0]),
            "max_pending_prefill_tokens": pick([50, 100, 10**6]),
            "deadline_drop": pick([True, False]),
        },
        no_upstream_seconds=pick([0, 0.5, 2]),
        tenants={
            name: {
                limit: n
                for limit, n in (
                    ("tokens_per_minute", pick([None, None, 200, 6000, 60_000])),
                    ("requests_per_minute", pick([None, None, 30, 300, 1000])),
                )
                if n is not None and chance.random() < 0.95
            }
            for name in ("u", "v", "gone")
            if chance.random() < 0.7
        },
        keys={key: pick([1, 3, 8, 20]) for key in "kl" if chance.random() < 0.7},
    )


class Life:
    """Books one step after the other; each chooses by chance what happens, among those it can happen to."""

    def __init__(self, driver: Driver, seed: int, steps: int, audit: Audit | None) -> None:
        self.driver, self.audit = driver, audit
        self.chance = random.Random(seed)
        self.left = steps
        self.number = 0
        self.ended: list[Ticket] = []
        self.upstreams = any_upstreams
        self.steps: dict[Callable[[], None], int] = {
            self.submit: 50,
            self.finish: 20,
            self.first_token: 14,
            self.cancel: 3,
            self.send_back: 4,
            self.health: 2,
            self.load: 4,
            self.other_settings: 1,
            self.twice: 2,
            self.nothing: 4,
        }
        driver.at(0, self.step)

    def step(self) -> None:
        if self.audit is not None:
            self.audit.nothing_was_forgotten()
        (what,) = self.chance.choices(list(self.steps), list(self.steps.values()))
        if len(self.running()) > 30:
            what = self.finish
        what()
        if self.audit is not None:
            self.audit()
        self.left -= 1
        then = self.driver.clock.now() + self.chance.choice(NANOSECONDS)
        self.driver.at(then, self.step if self.left else self.end)

    def with_stage(self, *stages: Stage) -> list[str]:
        return [name for name, ticket in self.driver.tickets.items() if ticket.stage in stages]

    def running(self) -> list[str]:
        return self.with_stage(Stage.DISPATCHED)

    # ------------------------------------------------------------------ what can happen

    def submit(self) -> None:
        pick = self.chance.choice
        self.number += 1
        name, tenant, priority = f"r{self.number}", pick("uuvw"), pick(PRIORITIES)
        subtenant = f"{tenant}/{self.chance.randrange(3000)}" if self.chance.random() < 0.2 else None
        prompts = pick([1, 1, 1, 2])
        if self.audit is not None:
            self.audit.offer(name)
        try:
            ticket = self.driver.submit(
                name,
                priority,
                pick(LENGTHS),
                tenant=tenant,
                key=pick(["k", "l", None]),
                fairness_id=subtenant,
                model=pick("mmmx"),
                streaming=self.chance.random() < 0.7,
                body_bytes=pick([0, 10, 10, 90]),
                timeout=pick([None, None, None, 0, 0.3, 2]),
                max_output_tokens=pick([None, None, 0, 3, 1000]),
                prompts=prompts,
                sequences=prompts * pick([1, 1, 3]),
            )
        except (RequestTooLong, KeyError):
            if self.audit is not None:
                self.audit.withdraw(name)
            return
        admission = self.driver.admission
        if admission.draining:
            assert ticket.outcome is Outcome.REJECTED_DRAINING
        elif admission.parameters.classes[priority].observe:
            assert ticket.stage is Stage.DISPATCHED
            assert ticket.exempt is (ticket.would_be is not None)

    def finish(self) -> None:
        """Complete, broken off midway, or refused before anything ran."""
        if not (running := self.running()):
            return
        name = self.chance.choice(running)
        used = Usage(self.chance.choice([1, 20, 450]), self.chance.choice([0, 3, 30, 900]), 0)
        outcome, delivered = self.chance.choices(
            [
                (Outcome.COMPLETED, Delivered(used, self.driver.clock.now(), 1000)),
                (Outcome.CLIENT_GONE_STREAMING, Delivered(used)),
                (Outcome.UPSTREAM_ABORTED, Delivered(used)),
                (Outcome.UPSTREAM_REFUSED, Delivered()),
            ],
            [12, 2, 1, 2],
        )[0]
        if self.audit is not None:
            self.audit.releases(self.driver.tickets[name].upstream)
        self.ended.append(self.driver.tickets[name])
        self.driver.finish(name, outcome=outcome, delivered=delivered)

    def first_token(self) -> None:
        if running := self.running():
            self.driver.first_token(self.chance.choice(running))

    def cancel(self) -> None:
        if waiting := self.with_stage(Stage.THROTTLED, Stage.READY):
            self.driver.cancel(self.chance.choice(waiting))

    def send_back(self) -> None:
        admission, tickets = self.driver.admission, self.driver.tickets
        if names := [name for name in self.running() if admission.may_requeue(tickets[name])]:
            ticket = tickets[name := self.chance.choice(names)]
            if self.audit is not None:
                self.audit.sends_back(ticket.upstream)
            not_reached = admission.may_go_elsewhere(ticket) and self.chance.random() < 0.3
            self.driver.requeue(name, reached=not not_reached)

    def some_upstream(self) -> str:
        return self.chance.choice(self.driver.admission.parameters.upstreams).name

    def health(self) -> None:
        self.driver.health(self.some_upstream(), self.chance.random() < 0.75)

    def load(self) -> None:
        pick = self.chance.choice
        told = EngineLoad(
            waiting=pick([None, 0, 3, 9]), kv_usage=pick([None, 0.2, 0.6, 1.0]), kv_tokens=pick([None, 900])
        )
        self.driver.engine_load(self.some_upstream(), told)

    def other_settings(self) -> None:
        self.driver.reconfigure(any_settings(self.chance, self.upstreams))

    def twice(self) -> None:
        """What has ended cannot end again, nor leave, nor get a first token."""
        if not self.ended:
            return
        ticket = self.chance.choice(self.ended)
        self.driver.admission.finish(ticket, Outcome.COMPLETED, Delivered(Usage(1, 1)))
        self.driver.admission.cancel(ticket)
        self.driver.admission.first_token(ticket)
        assert not self.driver.admission.may_requeue(ticket)
        self.ended.clear()

    def nothing(self) -> None:
        return

    def end(self) -> None:
        """The gateway drains, and what runs ends."""
        driver = self.driver
        driver.drain()
        for what in (self.send_back, self.submit) * 5:
            what()
            assert not self.with_stage(Stage.THROTTLED, Stage.READY)
        for name in self.running():
            driver.finish(name)
        if self.audit is not None:
            self.audit()


EXPECTED = {
    "dispatched",
    "at once",
    "promoted",
    "completed",
    "client_gone_queued",
    "client_gone_streaming",
    "upstream_refused",
    "queue_timeout",
    "rejected_rate",
    "rejected_queue_full",
    "rejected_no_upstream",
    "by the tenant's limit",
    "sent back",
    "would be rejected_rate",
    "would be rejected_queue_full",
    "would be rejected_no_upstream",
    "would be bad_request",
    "other upstreams",
    "upstream left with leases",
}


@pytest.mark.slow
def test_a_long_life() -> None:
    """After each of many thousand steps all counts are right, the books balance, the order was kept, nobody
    is past its deadline and nobody waits who could go; at the end nothing at all is left."""
    with closing(VirtualDriver(any_settings(random.Random(0)))) as driver:
        audit = Audit(driver)
        Life(driver, 0, STEPS, audit)
        driver.run(STEPS + 3600)
        audit.nothing_is_left()
        rare = {what: audit.met[what] for what in EXPECTED if audit.met[what] < STEPS / 2000}
        assert not rare


@pytest.mark.parametrize("seed", range(3))
def test_a_life_of_reloads(seed: int) -> None:
    """Whatever the upstreams are next and however soon: the same holds."""
    with closing(VirtualDriver(any_settings(random.Random(seed)))) as driver:
        audit = Audit(driver)
        life = Life(driver, seed, 1500, audit)
        life.upstreams = quite_other_upstreams
        life.steps[life.other_settings] = 12
        driver.run(1500 + 3600)
        audit.nothing_is_left()
        assert audit.met["other upstreams"] > 100
        assert audit.met["upstream left with leases"] > 50


@pytest.mark.parametrize("seed", range(3))
def test_upstreams_that_only_look_other_change_nothing(seed: int) -> None:
    """When each serves one more model, for which nobody asks, all is decided as if nothing had been."""
    logs = []
    for reloads in (0, 60):
        driver = VirtualDriver(any_settings(random.Random(seed)))
        life = Life(driver, seed, 1500, None)
        life.steps[life.other_settings] = 0
        when = random.Random(seed)
        for number in range(reloads):
            driver.at(when.randrange(9 * 10**9), partial(serve_one_more, driver, number))
        driver.run(1500)
        assert len(driver.log) > 300
        logs.append(driver.log)
    assert_same_decisions(*logs)


def serve_one_more(driver: Driver, number: int) -> None:
    parameters = driver.admission.parameters
    upstreams = []
    for engine in parameters.upstreams:
        asked_for = tuple(model for model in engine.models if model in "mxy*")
        upstreams.append(replace(engine, models=(*asked_for, f"{engine.name}{number}")))
    driver.reconfigure(replace(parameters, upstreams=tuple(upstreams)))


@pytest.mark.parametrize("seed", range(3))
def test_both_drivers_lead_the_same_life(seed: int) -> None:
    """Whatever happens is decided in the same way at the same instants on virtual time and under asyncio."""
    logs = []
    for kind in (VirtualDriver, AsyncioDriver):
        with closing(kind(any_settings(random.Random(seed)))) as driver:
            Life(driver, seed, 1500, None)
            driver.run(1500)
            logs.append(driver.log)
    assert_same_decisions(*logs)
    assert len(logs[0]) > 500


class WatchedLife(Life):
    """Notes after each step what is counted of those that went: levels, service, who was passed over."""

    def __init__(self, driver: Driver, seed: int, steps: int) -> None:
        super().__init__(driver, seed, steps, None)
        self.counted: list[object] = []

    def step(self) -> None:
        super().step()
        for pool in self.driver.admission.pools:
            lines = (*pool.throttled, *pool.scheduler.ready)
            service = [(line.counters._service.copy(), line.counters._floor) for line in lines]
            levels = pool.buckets.levels.copy(), pool.buckets.own_levels.copy()
            self.counted.append(
                (levels, service, pool.scheduler.skipped.copy(), pool.activity.requests.copy())
            )


@pytest.mark.parametrize("seed", range(4))
def test_who_finds_nobody_waiting_goes_as_if_through_both_lines(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way of one that is alone decides, charges and counts as the long one does."""
    lives, ways = [], []
    short_way = Pool._send_at_once
    for at_once in (True, False):
        gone = [0]

        def goes(
            pool: Pool, ticket: Ticket, now: int, at_once: bool = at_once, gone: list[int] = gone
        ) -> bool:
            went = at_once and short_way(pool, ticket, now)
            gone[0] += went
            return went

        monkeypatch.setattr(Pool, "_send_at_once", goes)
        driver = VirtualDriver(any_settings(random.Random(seed)))
        life = WatchedLife(driver, seed, 2500)
        life.steps[life.finish] = 40
        driver.run(2500)
        lives.append((life.counted, [ticket.charged for ticket in driver.tickets.values()], driver.log))
        ways.append(gone[0])
    assert_same_decisions(lives[0][2], lives[1][2])
    assert lives[0] == lives[1]
    assert ways[0] > 100
    assert ways[1] == 0
