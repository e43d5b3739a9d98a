"""What a replica may use while the store does not answer, as a story in seconds."""

from gateway.fleet.contract import AllowanceDemand, PlacesDemand, State
from gateway.fleet.ledger import Ledger
from gateway.fleet.standing import FleetRules, Standing
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
    """Holding after a second, alone after ten, shared at the first answer."""
    ledger, busy, _ = shared(100.0)
    told = []
    for tenths in range(5, 130):
        _, change = busy.failed(ASKS, "unreachable", 100 + tenths / 10)
        if change is not None:
            told.append((tenths, change.before, change.after, change.reason, change.replicas))
    assert told == [
        (10, State.SHARED, State.HOLDING, "unreachable", 2),
        (100, State.HOLDING, State.ALONE, "unreachable", 2),
    ]
    granted = ledger.renew(113_000_000, "busy", busy.renewal(ASKS, 113.0))
    _, change = busy.answered(granted, (), 113.0, 113.0)
    assert change is not None
    assert (change.before, change.after) == (State.ALONE, State.SHARED)


def test_the_last_share_holds_as_long_as_its_lease() -> None:
    """Only allowances, which would run out, get their part of what flows in."""
    _, busy, _ = shared(100.0)
    before = busy.share
    share, _ = busy.failed(ASKS, "unreachable", 109.9)
    assert (share.pools, share.places) == (before.pools, before.places)
    assert [told.per_minute for told in share.allowances] == [30_000]
    assert not share.leads


def test_down_to_the_local_part_at_once_and_up_to_it_a_second_later() -> None:
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
    """It does not begin with the whole budget, nor without any."""
    standing = Standing(FleetRules(replicas_assumed=3))
    share, change = standing.failed(ASKS, "denied", 5.0)
    assert change is None
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
