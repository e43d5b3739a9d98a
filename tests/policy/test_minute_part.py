"""A tenant's minute where several gateways share it: marks, first uses, refunds, debt, a silent store."""

import random

import pytest

from gateway.policy.clock import NEVER
from gateway.policy.minute_part import MORE_AFTER_NS, AllowanceUse, MinutePart
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Ticket
from gateway.policy.tenant_limits import TOLD_MAX, TenantLimits
from tests.support.policy_settings import P1, ask, nanoseconds, policy

SECOND = 1_000_000_000
SILENT = 30_000
"""Thousandths that flow in per minute, of 60 tokens for two gateways."""


def part(per_minute: int = 60, gateways: int = 2) -> MinutePart:
    return MinutePart(per_minute, gateways, 0)


def pays(bucket: MinutePart, amount: int, now: int) -> bool:
    """As `TenantLimits` does it; amounts are thousandths."""
    bucket.advance(now)
    bucket.asked(amount, now)
    if not bucket.affords(amount):
        return False
    bucket.take(amount)
    return True


def told(bucket: MinutePart, now: int = 0) -> AllowanceUse:
    use = bucket.use(now)
    assert use is not None
    return use


# ---------------------------------------------------------------------- before the store knows


def test_a_tenant_that_nobody_was_told_of_has_the_nth_part() -> None:
    """At once; what it wants beyond comes within two slices."""
    bucket = part()
    assert pays(bucket, 30_000, 0)
    assert not pays(bucket, 1000, 0)
    assert bucket.wait_ns(1000) == MORE_AFTER_NS
    assert bucket.left == 30


def test_what_was_used_before_the_store_knew_is_charged_with_the_second_telling() -> None:
    """In the first one the count stands where it stood before."""
    bucket = part()
    pays(bucket, 10_000, 0)
    assert told(bucket) == AllowanceUse(60_000, 0, 10_000, 10_000)
    assert told(bucket, SECOND // 10).used == 10_000


def test_a_tenant_that_is_not_in_use_is_not_told_of() -> None:
    """Neither before its first request nor long after its last one."""
    bucket = part()
    assert bucket.use(0) is None
    pays(bucket, 1000, SECOND)
    assert bucket.use(70 * SECOND) is not None
    assert bucket.use(71 * SECOND) is None


def test_a_limit_below_the_number_of_gateways_is_used_by_whoever_is_asked() -> None:
    """Nothing passes in the first moment; then the store says who may."""
    bucket = part(2, gateways=3)
    assert not pays(bucket, 1000, 0)
    assert bucket.wait_ns(1000) == MORE_AFTER_NS
    bucket.take_part(told(bucket).used + 2000, 2000, 0, 0)
    assert pays(bucket, 1000, MORE_AFTER_NS)
    assert pays(bucket, 1000, MORE_AFTER_NS)
    assert not pays(bucket, 1000, MORE_AFTER_NS)


def test_a_limit_of_nothing_lets_nothing_pass() -> None:
    """Whatever state the store is in."""
    for mark, inflow in ((0, 0), (1000, 1000)):
        bucket = part(0)
        assert not pays(bucket, 0, 0)
        assert bucket.wait_ns(1000) == NEVER
        bucket.take_part(mark, 0, inflow if bucket.per_minute else 0, 0)
        assert not bucket.affords(0)
        assert (bucket.left, bucket.full_after_ns) == (0, 0)


# ---------------------------------------------------------------------- up to a mark


def test_it_uses_up_to_the_mark() -> None:
    """And nothing flows in besides, however long no new one comes."""
    bucket = part()
    pays(bucket, 1000, 0)
    told(bucket)
    bucket.take_part(5000, 40_000, 0, 0)
    assert [pays(bucket, 2000, now * SECOND) for now in (1, 20, 69)] == [True, True, False]
    assert bucket.left == 60


def test_the_same_mark_again_is_no_more() -> None:
    """Nor does a refund in between give anything twice."""
    bucket = part()
    pays(bucket, 4000, 0)
    for _ in range(3):
        bucket.take_part(5000, 40_000, 0, 0)
    assert not pays(bucket, 1001, 0)
    bucket.give(3000)
    for _ in range(3):
        bucket.take_part(5000, 40_000, 0, 0)
    assert pays(bucket, 4000, 0)
    assert not pays(bucket, 1, 0)


def test_a_refund_makes_the_count_less() -> None:
    """The store hears of it as of any use."""
    bucket = part()
    pays(bucket, 9000, 0)
    told(bucket)
    assert told(bucket).used == 9000
    bucket.give(4000)
    assert told(bucket).used == 5000


def test_a_mark_below_the_count_is_debt() -> None:
    """An older answer, or a settlement that cost more: nothing passes until the mark has moved beyond."""
    bucket = part()
    pays(bucket, 10_000, 0)
    bucket.debit(8_000, 10.0)
    bucket.take_part(12_000, 0, 0, 0)
    assert not pays(bucket, 1, 0)
    assert bucket.wait_ns(1000) == SECOND
    bucket.take_part(19_000, 1000, 0, 0)
    assert pays(bucket, 1000, 0)


def test_what_all_have_left_is_told() -> None:
    """Below zero it is the debt of all, and the wait is until the fleet's bucket has it."""
    bucket = part()
    bucket.take_part(0, -5000, 0, 0)
    assert bucket.left == -5
    assert bucket.wait_ns(1000) == 6 * SECOND
    assert bucket.full_after_ns == 65 * SECOND


def test_wanted_is_what_was_asked_in_a_second() -> None:
    """Of this one or the one before, refused or not; after two quiet ones nothing is."""
    bucket = part()
    pays(bucket, 20_000, 0)
    pays(bucket, 20_000, SECOND // 2)
    assert told(bucket, SECOND // 2).wanted == 40_000
    pays(bucket, 1000, SECOND)
    assert told(bucket, SECOND).wanted == 40_000
    assert told(bucket, 2 * SECOND).wanted == 1000
    assert told(bucket, 4 * SECOND).wanted == 0


# ---------------------------------------------------------------------- idle, and back


def test_idle_for_a_minute_and_back_it_has_its_part_once() -> None:
    """Not what the old mark left, which others have got meanwhile."""
    bucket = part()
    pays(bucket, 1000, 0)
    bucket.take_part(told(bucket).used + 60_000, 60_000, 0, 0)
    assert pays(bucket, 30_001, 70 * SECOND) is False
    assert pays(bucket, 30_000, 70 * SECOND)
    assert not pays(bucket, 1, 70 * SECOND)


def test_idle_and_back_it_does_not_charge_what_was_charged() -> None:
    """The first telling repeats the count that was told last."""
    bucket = part()
    pays(bucket, 5000, 0)
    assert [told(bucket).used for _ in range(2)] == [0, 5000]
    pays(bucket, 2000, 100 * SECOND)
    assert [told(bucket, 100 * SECOND).used for _ in range(2)] == [5000, 7000]


def test_what_a_long_answer_used_after_its_tenant_had_gone_is_charged_when_it_comes_back() -> None:
    """But no more than a part: the rest has flowed in again."""
    bucket = part()
    pays(bucket, 5000, 0)
    assert [told(bucket).used for _ in range(2)] == [0, 5000]
    bucket.advance(80 * SECOND)
    bucket.debit(4000, 10.0)
    pays(bucket, 1000, 90 * SECOND)
    assert told(bucket, 90 * SECOND).used == 5000
    assert told(bucket, 90 * SECOND).used == 10_000
    bucket.advance(200 * SECOND)
    bucket._used += 500_000
    pays(bucket, 1000, 200 * SECOND)
    assert told(bucket, 200 * SECOND).used == 511_000 - 30_000


# ---------------------------------------------------------------------- the store is silent


def test_while_the_store_is_silent_the_nth_part_flows_in() -> None:
    """Beside what was left up to the mark, and up to a part."""
    bucket = part()
    pays(bucket, 1000, 0)
    bucket.take_part(11_000, 10_000, 0, 0)
    bucket.take_part(11_000, 10_000, SILENT, SECOND)
    assert pays(bucket, 10_000, SECOND)
    assert not pays(bucket, 1000, SECOND)
    assert bucket.wait_ns(1000) == 2 * SECOND
    assert pays(bucket, 1000, 3 * SECOND)
    for now in range(4, 70):
        bucket.take_part(11_000, 10_000, SILENT, now * SECOND)
    assert pays(bucket, 30_000, 69 * SECOND)
    assert not pays(bucket, 1500, 69 * SECOND)


def test_while_the_store_is_silent_a_part_pays_for_what_is_larger() -> None:
    """It would never be paid otherwise; the debt keeps the rate."""
    bucket = part()
    bucket.take_part(30_000, 30_000, SILENT, 0)
    assert pays(bucket, 50_000, 0)
    assert bucket.left == -20
    assert not pays(bucket, 50_000, 99 * SECOND)
    assert bucket.wait_ns(50_000) == SECOND
    assert pays(bucket, 50_000, 100 * SECOND)


@pytest.mark.parametrize(("per_minute", "gateways"), [(2, 3), (1, 10), (60, 7)])
def test_no_limit_is_starved_while_the_store_is_silent(per_minute: int, gateways: int) -> None:
    """However small: a gateway lets a request through each gateways / limit minutes."""
    bucket = part(per_minute, gateways)
    inflow = per_minute * 1000 // gateways
    bucket.take_part(inflow, inflow, inflow, 0)
    minutes, passed = 100, 0
    for second in range(minutes * 60):
        bucket.take_part(inflow, inflow, inflow, second * SECOND)
        passed += pays(bucket, 1000, second * SECOND)
    expected = per_minute / gateways * minutes
    assert 0.9 * expected - 1 <= passed <= expected + per_minute / gateways + 1


def test_the_store_back_with_the_mark_it_had_before_gives_nothing_twice() -> None:
    """What had flowed in meanwhile is gone."""
    bucket = part()
    pays(bucket, 1000, 0)
    bucket.take_part(1000, 20_000, 0, 0)
    bucket.take_part(1000, 20_000, SILENT, SECOND)
    bucket.take_part(1000, 20_000, 0, 30 * SECOND)
    assert not pays(bucket, 1, 30 * SECOND)


def test_idle_in_debt_with_a_silent_store_is_no_way_out_of_it() -> None:
    """Only time is."""
    bucket = part(60, 4)
    bucket.take_part(15_000, 15_000, 15_000, 0)
    assert pays(bucket, 60_000, 0)
    told(bucket)
    bucket.advance(71 * SECOND)
    assert bucket.use(71 * SECOND) is None
    assert not pays(bucket, 1000, 71 * SECOND)
    assert pays(bucket, 15_000, 240 * SECOND)


# ---------------------------------------------------------------------- other settings, other numbers


def test_with_more_gateways_the_part_of_an_unknown_tenant_is_less() -> None:
    """From now on, and with fewer it grows by and by: nothing is refilled."""
    bucket = part(60, gateways=1)
    bucket.share(3, 0)
    assert not pays(bucket, 20_001, 0)
    assert pays(bucket, 20_000, 0)
    bucket.share(2, 0)
    assert not pays(bucket, 1, 0)
    assert pays(bucket, 1000, 2 * SECOND)


def test_a_known_tenant_keeps_its_mark_with_more_gateways() -> None:
    """The store will tell."""
    bucket = part()
    pays(bucket, 1000, 0)
    bucket.take_part(31_000, 50_000, 0, 0)
    bucket.share(30, 0)
    assert pays(bucket, 30_000, 0)


def test_another_limit_is_no_refill() -> None:
    """Back and forth, before the store was told and after."""
    bucket = part()
    pays(bucket, 30_000, 0)
    for _ in range(3):
        bucket.reconfigure(600, 0)
        bucket.reconfigure(60, 0)
    assert not pays(bucket, 1, 0)
    bucket.reconfigure(2, 0)
    assert told(bucket).per_minute == 2000
    assert bucket.left <= 2


# ---------------------------------------------------------------------- all tenants of a gateway


def limited(tenants: int = 1, **given: int) -> TenantLimits:
    limits = {f"t{i}": {"tokens_per_minute": 60, **given} for i in range(tenants)}
    made = TenantLimits(policy(tenants=limits), 0)
    made.share(2, 0)
    return made


def ticket(tenant: str = "t0", cost: int = 1000) -> Ticket:
    made = Ticket(1, ask("r", P1, tenant=tenant), 0)
    made.cost = cost
    return made


def uses(limits: TenantLimits, now: int) -> dict[tuple[str, str], AllowanceUse]:
    return dict(limits.use(now))


def test_a_request_that_is_looked_at_twice_was_asked_once() -> None:
    """Nor does it take one more place of its key."""
    limits = limited(requests_per_minute=60)
    for again in (False, True):
        assert limits.refusal(ticket(cost=90_000), 0, again) is not None
    told_of = uses(limits, 0)
    assert told_of["t0", "tokens"].wanted == 90_000
    assert told_of["t0", "requests"].wanted == 1000


def test_tenants_come_and_go_while_the_limits_are_shared() -> None:
    """A new one has its part; of one that has gone nothing is told, and its running request ends."""
    limits = limited(2)
    going = ticket("t1")
    assert limits.refusal(going, 0) is None
    limits.reserve(going, 0)
    limits.reconfigure(_of("t0", "t2"), 0)
    assert limits.refusal(ticket("t2", 30_000), 0) is None
    assert limits.refusal(ticket("t2", 30_001), 0) is not None
    assert set(uses(limits, 0)) == {("t2", "tokens")}
    limits.settle(going, 5000, 0)
    assert limits.part_of("t1", "tokens", 0) is None


def _of(*tenants: str) -> PolicyParameters:
    return policy(tenants={name: {"tokens_per_minute": 60} for name in tenants})


def test_those_used_last_are_told_of_and_the_others_have_their_part() -> None:
    """Nobody is left standing at a mark that no longer moves, nor refilled by being forgotten."""
    limits = limited(TOLD_MAX + 1)
    limits.refusal(ticket("t0"), 0)
    first = limits.part_of("t0", "tokens", 0)
    assert first is not None
    uses(limits, 0)
    first.take_part(2000, 60_000, 0, 0)
    for i in range(1, TOLD_MAX + 1):
        limits.refusal(ticket(f"t{i}"), 0)
    assert ("t0", "tokens") not in uses(limits, 0)
    assert limits.refusal(ticket("t0", 2001), 0) is not None
    assert limits.refusal(ticket("t0", 2000), 0) is None
    assert limits.refusal(ticket("t0", 12_000), 20 * SECOND) is None


def test_the_number_of_gateways_reaches_every_tenant() -> None:
    """Also those that were not used yet."""
    limits = limited()
    limits.share(6, 0)
    assert limits.refusal(ticket(cost=10_000), 0) is None
    assert limits.refusal(ticket(cost=10_001), 0) is not None


@pytest.mark.parametrize("seed", range(5))
def test_no_more_is_used_than_the_marks_allow(seed: int) -> None:
    """Over any order of uses, refunds and marks: the count never passes the last mark, but for a settlement
    within the debt."""
    chance, bucket, now, mark = random.Random(seed), part(600), 0, 0
    pays(bucket, 1, 0)
    bucket.take_part(mark, 600_000, 0, 0)
    spent = 1
    for _ in range(2000):
        now += chance.randrange(SECOND)
        what = chance.randrange(4)
        if what == 0:
            mark = spent + chance.randrange(20_000)
            bucket.take_part(mark, chance.randrange(600_000), 0, now)
        elif what == 1 and spent > 1000:
            back = chance.randrange(1000)
            bucket.give(back)
            spent -= back
        else:
            amount = chance.randrange(1, 5000)
            if pays(bucket, amount, now):
                spent += amount
                assert spent <= mark
        assert told(bucket, now).used in (spent, 0)


def test_nanoseconds_are_whole() -> None:
    """A level is exact to a part in 6 × 10¹⁰ of a token, however often somebody looks."""
    one, other = part(7, 3), part(7, 3)
    for bucket in (one, other):
        bucket.take_part(0, 0, 2333, 0)
    for i in range(1, 1001):
        one.advance(i * 30_000_001)
    other.advance(nanoseconds(30.000001))
    assert abs(one._level - other._level) <= 1000


def test_what_one_used_that_is_not_told_of_any_longer_is_told_once_more() -> None:
    """The store charges from one telling to the next: else a tenant that is told of now and then would never
    be charged."""
    limits = limited(TOLD_MAX + 1)
    limits.refusal(ticket("t0"), 0)
    uses(limits, 0)
    limits.refusal(ticket("t0", 1500), 0)
    limits.reserve(ticket("t0", 1500), 0)
    for i in range(1, TOLD_MAX + 1):
        limits.refusal(ticket(f"t{i}"), 0)
    assert uses(limits, 0)["t0", "tokens"].used == 1500
    assert ("t0", "tokens") not in uses(limits, 0)


def test_a_debt_is_the_tenants_and_not_the_parts() -> None:
    """An answer that cost more than its part holds is charged in full, as far as the tenant may owe."""
    bucket = part(60_000)
    pays(bucket, 1, 0)
    bucket.take_part(2_000, 50_000_000, 0, 0)
    bucket.debit(40_000_000, 10.0)
    told = bucket.use(0)
    assert told is not None
    bucket.use(0)
    assert bucket.left == 10_000
