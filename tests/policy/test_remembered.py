"""What the policy remembers, so as not to find it out again, is what it would find: nothing that is decided
hangs on it."""

import random
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.clock import NEVER
from gateway.policy.pool import Pool
from gateway.policy.priority_queue import FairQueue
from gateway.policy.request import PRIORITIES
from gateway.policy.token_bucket import TokenBuckets
from tests.policy.scenarios.test_long_interleaving import Life, any_settings, quite_other_upstreams
from tests.policy.test_token_bucket import Run, Step, buckets, bursts_tried, ceilings_tried, runs
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P0, P1, P2

SECOND = 1_000_000_000
MS = SECOND // 1000


def forget(buckets: TokenBuckets) -> None:
    buckets._piece = None
    buckets._inflows.clear()


@settings(max_examples=80, deadline=None)
@given(
    runs,
    ceilings_tried,
    bursts_tried,
    st.lists(
        st.tuples(st.integers(0, 3_000_000), st.booleans(), st.integers(1, 20 * SECOND)),
        min_size=1,
        max_size=5,
    ),
)
def test_buckets_that_forget_hold_the_same(
    run: list[Step],
    ceilings: tuple[float, ...],
    burst: tuple[float, int],
    asked: list[tuple[int, bool, int]],
) -> None:
    """Buckets that find out all anew before each step have the same levels, to the unit, and predict the same
    payments, to the nanosecond."""
    remembering, forgetful = Run(ceilings, *burst), Run(ceilings, *burst)
    for number, (wait, operation) in enumerate(run):
        forget(forgetful.b)
        remembering.step(wait, operation)
        forgetful.step(wait, operation)
        one, other = remembering.b, forgetful.b
        assert (one.levels, one.own_levels) == (other.levels, other.own_levels)
        cost, own, horizon = asked[number % len(asked)]
        for p in PRIORITIES:
            forget(other)
            told = one.time_until(p, cost, own and one.limited(p, one._now), horizon)
            assert told == other.time_until(p, cost, own and other.limited(p, other._now), horizon)
            assert one.recent_inflow(p) == other.recent_inflow(p)


class ForgetfulLife(Life):
    """Before each step the policy forgets all that it could find out again."""

    def step(self) -> None:
        for pool in self.driver.admission.pools:
            forget_all(pool)
        super().step()


def forget_all(pool: Pool) -> None:
    forget(pool.buckets)
    pool.turns.may_have_changed()
    pool.room.routes._by_model.clear()
    lines: list[FairQueue] = list(pool.throttled)
    for ready in pool.scheduler.ready:
        lines += ready._lines.values()
    for line in lines:
        line._first = None


@pytest.mark.parametrize("seed", range(4))
def test_a_forgetful_policy_decides_the_same(seed: int) -> None:
    """Whatever happens, with other settings and other upstreams on the way: the same decisions at the same
    nanoseconds, the same records, the same levels."""
    outcomes = []
    for kind in (Life, ForgetfulLife):
        chance = random.Random(seed)
        with closing(VirtualDriver(replace(any_settings(chance), law="severity"))) as driver:
            life = kind(driver, seed, 600, None)
            if seed % 2:
                life.upstreams = quite_other_upstreams
            driver.run(600 + 3600)
            levels = [(pool.buckets.levels, pool.buckets.own_levels) for pool in driver.admission.pools]
            outcomes.append((driver.log, driver.endings.records, levels))
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0][0]) > 100


@pytest.mark.parametrize("until", [SECOND // 2, NEVER])
def test_an_activity_that_begins_or_ends_counts_at_once(until: int) -> None:
    """While buckets fill that others lend to, P0 becomes active, and later stops to be: those that forgot and
    those that did not hold the same, for which the lent tokens must have counted differently."""
    remembering, forgetful = buckets(), buckets()
    for b in (remembering, forgetful):
        for p in (P1, P2):
            b.take(p, 2_000_000, False)  # P0 is full, and lends
    for now, active_until in ((1, None), (2, until), (SECOND // 4, None), (SECOND // 3, 0), (SECOND, None)):
        for b in (remembering, forgetful):
            b.advance(now)
            b.time_until(P2, 9_000_000, False, 10 * SECOND)  # which finds out how it flows
            if active_until is not None:
                b.active_until[P0] = active_until
        assert remembering.levels[P2] < 0
        assert remembering.own_levels == forgetful.own_levels
        assert remembering.levels == forgetful.levels
        forget(forgetful)


def test_an_activity_that_ends_and_begins_again_has_counted() -> None:
    """20 tokens are missing, which P2 would have after 40 ms below an active P0. For 5 ms there was none, and
    twice as many came: the bucket is full before, and no fuller than full after."""
    b = buckets()
    b.take(P2, 20_000, False)
    b.active_until[P0] = NEVER
    assert b.time_until(P2, 25_000, False, SECOND) == 40 * MS
    b.advance(5 * MS)
    b.active_until[P0] = 0
    b.advance(10 * MS)
    b.active_until[P0] = NEVER
    b.advance(37 * MS)
    assert b.levels == b.bursts


def test_an_activity_that_begins_delays_a_payment_at_once() -> None:
    """50 tokens are missing: lent ones would bring them soon, but with P0 active the own share has to."""
    b = buckets()
    b.take(P1, 100_000, False)
    soon = b.time_until(P1, 125_000, True, 10 * SECOND)
    b.active_until[P0] = NEVER
    assert soon < b.time_until(P1, 125_000, True, 10 * SECOND) == -(-50 * SECOND // 350)
