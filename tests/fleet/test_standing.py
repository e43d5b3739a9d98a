"""What a replica may use while the store does not answer, as a story in seconds."""

from random import Random

import pytest

from gateway.fleet.contract import AllowanceDemand, PlacesDemand, PoolShare, State
from gateway.fleet.ledger import Ledger
from gateway.fleet.messages import Granted
from gateway.fleet.standing import Change, FleetRules, Standing
from tests.support.fleets import BUDGET, demand

ASKS = demand(900_000, places=PlacesDemand("gpu0", 30, 0, 40), bucket=AllowanceDemand("acme", 60_000, 0, 100))
IDLE = demand(places=PlacesDemand("gpu0", 30, 0, 0))


def shared(now: float) -> tuple[Ledger, Standing, Standing]:
    """A busy replica and an idle one, which the store has just answered."""
    ledger, busy, idle = Ledger(), Standing(FleetRules()), Standing(FleetRules())
    for step in range(6):
        for name, standing, asks in (("busy", busy, ASKS), ("idle", idle, IDLE)):
            at = now - (5 - step) * 0.1
            granted = ledger.renew(round(at * 1e6), name, standing.renewal(asks, at))
            standing.answered(granted, (), at, at)
    return ledger, busy, idle


def test_one_late_answer_is_no_change() -> None:
    """Half a second without an answer changes neither share nor state."""
    _, busy, _ = shared(100.0)
    before = busy.share
    assert busy.failed(ASKS, "timed_out", 100.5) == (before, None)


def test_a_silent_store_is_told_once_for_each_change() -> None:
    """Holding after a second, alone when its lease may be over before it looks again, shared at the first
    answer."""
    ledger, busy, _ = shared(100.0)
    told = []
    for tenths in range(5, 130):
        _, change = busy.failed(ASKS, "unreachable", 100.01 + tenths / 10)
        if change is not None:
            told.append((tenths, change.before, change.after, change.reason, change.replicas))
    assert told == [
        (10, State.SHARED, State.HOLDING, "unreachable", 2),
        (91, State.HOLDING, State.ALONE, "unreachable", 2),
    ]
    granted = ledger.renew(113_000_000, "busy", busy.renewal(ASKS, 113.0))
    _, change = busy.answered(granted, (), 113.0, 113.0)
    assert change is not None
    assert (change.before, change.after) == (State.ALONE, State.SHARED)


def test_each_reason_for_a_silence_is_told_once() -> None:
    """With what the store said; and again in the next silence."""
    ledger, busy, _ = shared(100.0)
    told = []
    for after, reason in ((0.5, "denied"), (1.5, "timed_out"), (2.0, "denied"), (3.0, "timed_out")):
        _, change = busy.failed(ASKS, reason, 100 + after, f"says {reason}")
        told.append(change and (change.before, change.after, change.reason, change.message))
    assert told == [
        None,
        (State.SHARED, State.HOLDING, "timed_out", "says timed_out"),
        (State.HOLDING, State.HOLDING, "denied", "says denied"),
        None,
    ]
    busy.answered(ledger.renew(103_000_000, "busy", busy.renewal(ASKS, 103.0)), (), 103.0, 103.0)
    again = [busy.failed(ASKS, reason, 105.0)[1] for reason in ("denied", "timed_out", "denied")]
    assert [change is not None for change in again] == [True, True, False]


def test_the_last_share_holds_as_long_as_its_lease() -> None:
    """Only allowances, which would run out, get their part of what flows in."""
    _, busy, _ = shared(100.0)
    before = busy.share
    share, _ = busy.failed(ASKS, "unreachable", 109.0)
    assert (share.pools, share.places) == (before.pools, before.places)
    assert [told.per_minute for told in share.allowances] == [30_000]
    assert not share.leads


@pytest.mark.parametrize("first_look", [1.0, 1.25, 1.5, 1.75])
def test_however_late_it_looks_its_lease_is_over_before_the_stores(first_look: float) -> None:
    """Each call takes its longest to fail, each pause is the longest."""
    _, busy, _ = shared(100.0)
    rules, at = FleetRules(), 100 + first_look
    while busy.failed(ASKS, "timed_out", at)[0].state is not State.ALONE:
        at += 4 / 3 * rules.retry_seconds + rules.call_seconds_max
    assert at <= 100 + rules.lease_seconds


def test_nobody_goes_up_before_the_last_one_has_gone_down() -> None:
    """The busy one was heard later than the idle one by all that is possible where both lose the store at the
    same moment, and looks as late as possible: together they never have more than C."""
    ledger, busy, idle = shared(100.0)
    rules = FleetRules()
    heard = 100 + 1.1 * rules.slice_seconds + 2 * rules.call_seconds_max
    busy.answered(ledger.renew(round(heard * 1e6), "busy", busy.renewal(ASKS, heard)), (), heard, heard)
    went_down = heard + rules.lease_seconds
    for hundredths in range(900, 1500):
        now = 100 + hundredths / 100
        if now >= went_down:
            busy.failed(ASKS, "timed_out", now)
        idle.failed(IDLE, "timed_out", now)
        assert sum(sum(standing.share.pools[0].rates) for standing in (busy, idle)) <= sum(BUDGET)
    assert sum(idle.share.pools[0].rates) == sum(BUDGET) // 2


def test_down_to_the_local_part_at_once_and_up_to_it_two_seconds_later() -> None:
    """So two that lose the store at the same time never use more than C together."""
    _, busy, idle = shared(100.0)
    assert busy.share.pools[0].rates[0] > BUDGET[0] // 2 > idle.share.pools[0].rates[0]
    for tenths in range(100, 130):
        now = 100 + tenths / 10
        rates = [
            standing.failed(asks, "unreachable", now)[0].pools[0].rates
            for standing, asks in ((busy, ASKS), (idle, IDLE))
        ]
        assert sum(map(sum, rates)) <= sum(BUDGET)
    assert rates == [tuple(rate // 2 for rate in BUDGET)] * 2
    assert busy.share.places[0].limit == idle.share.places[0].limit == 15
    assert busy.share.leads  # its own law sees to its part


def test_a_replica_that_never_reached_the_store_has_its_part_of_those_assumed() -> None:
    """It does not begin with the whole budget, nor without any; why is told once."""
    standing = Standing(FleetRules(replicas_assumed=3))
    share, change = standing.failed(ASKS, "denied", 5.0, "no such user")
    assert change == Change(State.JOINING, State.JOINING, "denied", "no such user", 3)
    assert standing.failed(ASKS, "denied", 5.3) == (share, None)
    assert share.state is State.JOINING
    assert share.pools[0].rates == tuple(rate // 3 for rate in BUDGET)
    assert share.places[0].limit == 10


def test_after_an_outage_it_declares_what_it_used_meanwhile() -> None:
    """The store gives to nobody else what it holds now."""
    _, busy, _ = shared(100.0)
    for tenths in range(10, 130):
        busy.failed(ASKS, "unreachable", 100 + tenths / 10)
    assert busy.renewal(ASKS, 113.0).held == (tuple(rate // 2 for rate in BUDGET),)
    assert busy.renewal(ASKS, 113.0).limits == (15,)


def test_the_clock_of_a_replica_does_not_matter() -> None:
    """One whose clock is a day ahead shares with one whose clock is not."""
    ledger, ahead, right = Ledger(), Standing(FleetRules()), Standing(FleetRules())
    for step in range(6):
        at = 100 + step * 0.1
        for name, standing, own in (("ahead", ahead, at + 86_400), ("right", right, at)):
            granted = ledger.renew(round(at * 1e6), name, standing.renewal(ASKS, own))
            standing.answered(granted, (), own, own)
    parts = [standing.share.pools[0].rates[0] for standing in (ahead, right)]
    assert abs(parts[0] - parts[1]) < 10
    assert sum(ahead.share.pools[0].rates) + sum(right.share.pools[0].rates) <= sum(BUDGET)


def test_an_emptied_store_does_not_make_the_fleet_smaller() -> None:
    """Until all have had the time to come again: what falls back to a part by their number stays a part."""
    _, busy, idle = shared(100.0)
    emptied = Ledger()
    for at, known in ((100.1, 2), (101.0, 2), (101.2, 1)):
        share, _ = busy.answered(emptied.renew(round(at * 1e6), "busy", busy.renewal(ASKS, at)), (), at, at)
        assert (at, share.replicas) == (at, known)
    granted = emptied.renew(101_300_000, "idle", idle.renewal(IDLE, 101.3))
    assert idle.answered(granted, (), 101.3, 101.3)[0].replicas == 2


def granted(rate: int) -> Granted:
    rates = (rate, 0, 0)
    pool = PoolShare(
        pool="gpu",
        rates=rates,
        budget=BUDGET,
        fence=0,
        active=(False,) * 3,
        prospects=rates,
        own=rates,
    )
    return Granted(epoch=1, replicas=2, fence=0, pools=(pool,), places=(), allowances=())


def test_the_next_call_comes_a_slice_after_an_answer_and_a_pause_after_a_failure() -> None:
    """At once where the answer took something away, but never twice in a row; ten per cent or a third more or
    less by chance."""
    standing, chance = Standing(FleetRules()), Random(1)

    def pause_after(rate: int) -> float:
        standing.answered(granted(rate), (), 100.0, 100.0)
        return standing.pause_seconds(chance)

    for _ in range(30):
        assert 0.09 <= pause_after(600_000) <= 0.11
        assert pause_after(500_000) == 0
        assert 0.09 <= pause_after(400_000) <= 0.11
        assert pause_after(300_000) == 0
        standing.failed(ASKS, "unreachable", 100.1)
        assert 0.2 <= standing.pause_seconds(chance) <= 0.4
