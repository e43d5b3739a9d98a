"""Limits per tenant and key: arithmetic against exact fractions, what is charged, and what is given back."""

import random
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policy.clock import NEVER
from gateway.policy.minute_bucket import MINUTE_NS, MinuteBucket
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Refusal, Ticket
from gateway.policy.tenant_limits import TenantLimits
from tests.support.minute_oracle import ExactMinute
from tests.support.policy_settings import P1, ask, nanoseconds, policy

SECOND = 1_000_000_000


def level(bucket: MinuteBucket) -> Fraction:
    return Fraction(bucket._level, MINUTE_NS)


limits = st.sampled_from([0, 1, 2, 7, 60, 999, 60_000, 10**7])
amounts = st.sampled_from([0, 1, 999, 1000, 1001, 30_000, 60_000, 61_000, 10**8])
spans = st.sampled_from([0, 1, 7, 999_999_937, SECOND, 8_571_428_571, 30 * SECOND, MINUTE_NS, 10**13])
seconds_of_debt = st.sampled_from([0.0, 0.5, 10.0, 60.0])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("run"), spans),
        st.tuples(st.just("pay"), amounts),
        st.tuples(st.just("give"), amounts),
        st.tuples(st.just("debit"), amounts),
        st.tuples(st.just("change"), limits),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(limits, seconds_of_debt, operations)
def test_a_bucket_counts_exactly(per_minute: int, debt: float, run: list[tuple[str, int]]) -> None:
    """After any operations a bucket holds what exact arithmetic says, affords the same, and tells the first
    nanosecond at which it will."""
    bucket, exact, now = MinuteBucket(per_minute, 0), ExactMinute(per_minute), 0
    for what, number in run:
        if what == "run":
            now += number
            bucket.advance(now)
            exact.run(now)
        elif what == "pay":
            assert bucket.affords(number) == exact.affords(number)
            _wait_is_exact(bucket, exact, number)
            if exact.affords(number):
                bucket.take(number)
                exact.take(number)
        elif what == "give":
            bucket.give(number)
            exact.give(number)
        elif what == "debit":
            bucket.debit(number, debt)
            exact.debit(number, Fraction(debt))
        else:
            bucket.reconfigure(number, now)
            exact.change(number)
        assert level(bucket) == exact.level <= exact.per_minute
        assert bucket.left == exact.level // 1


def _wait_is_exact(bucket: MinuteBucket, exact: ExactMinute, amount: int) -> None:
    wait = bucket.wait_ns(amount)
    if exact.per_minute == 0:
        assert wait == NEVER
        return
    later = ExactMinute(exact.per_minute, exact.now)
    later.level = exact.level
    if wait:
        later.run(exact.now + wait - 1)
        assert not later.affords(amount)
    later.run(exact.now + wait)
    assert later.affords(amount)
    later.level = exact.level
    later.now = exact.now
    full_after = bucket.full_after_ns
    if full_after:
        later.run(exact.now + full_after - 1)
        assert later.level < exact.per_minute
    later.run(exact.now + full_after)
    assert later.level == exact.per_minute


def test_a_bucket_starts_with_its_full_minute_and_holds_no_more() -> None:
    """Sixty a minute: sixty at once, then one each second, and after an hour sixty again."""
    bucket = MinuteBucket(60, 0)
    for _ in range(60):
        assert bucket.affords(1000)
        bucket.take(1000)
    assert not bucket.affords(1000)
    assert bucket.wait_ns(1000) == SECOND
    bucket.advance(SECOND - 1)
    assert not bucket.affords(1000)
    bucket.advance(SECOND)
    assert bucket.affords(1000)
    bucket.advance(3600 * SECOND)
    assert bucket.left == 60


def test_time_does_not_go_back() -> None:
    """An earlier time refills nothing, and costs nothing later."""
    bucket = MinuteBucket(60, 10 * SECOND)
    bucket.take(60_000)
    bucket.advance(5 * SECOND)
    assert bucket.left == 0
    bucket.advance(11 * SECOND)
    assert bucket.left == 1


def test_debt_at_settlement_ends_where_it_must() -> None:
    """A debit stops at the seconds of debt; one already deeper in debt takes nothing more."""
    bucket = MinuteBucket(60, 0)
    bucket.debit(10**9, 10.0)
    assert level(bucket) == -10
    bucket.debit(1, 10.0)
    assert level(bucket) == -10
    bucket.take(5000)  # a request larger than its minute
    bucket.debit(1000, 10.0)
    assert level(bucket) == -15


# ---------------------------------------------------------------------- tenants


_seq = iter(range(1, 10**9))


def ticket(tokens: int = 0, tenant: str = "a", key: str | None = None, **given: Any) -> Ticket:
    made = Ticket(next(_seq), ask("r", P1, max(tokens, 1), tenant=tenant, key=key, **given), 0)
    made.cost = tokens * 1000
    return made


def limited(**given: Any) -> TenantLimits:
    return TenantLimits(policy(**given), 0)


def left(tenants: TenantLimits, tenant: str = "a", now: int = 0) -> tuple[Fraction | None, Fraction | None]:
    """Tokens and requests."""
    tokens, requests = tenants.buckets(tenant, now)
    return (None if tokens is None else level(tokens), None if requests is None else level(requests))


def test_both_limits_must_agree() -> None:
    """With tokens left and no requests, or the other way round, the answer is no and nothing is taken."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 100, "requests_per_minute": 1}})
    first = ticket(10)
    assert tenants.refusal(first, 0) is None
    tenants.reserve(first, 0)
    assert left(tenants) == (90, 0)
    refused = tenants.refusal(ticket(10), 0)
    assert refused is not None
    assert "1 requests per minute" in refused.detail
    assert left(tenants) == (90, 0)
    later = 60 * SECOND
    tenants.reserve(big := ticket(100), later)
    assert left(tenants, now=later) == (0, 0)
    tenants.settle(big, 100_000, later)
    later += 59 * SECOND
    assert tenants.refusal(ticket(1), later) is not None


def test_the_longest_wait_is_told() -> None:
    """Short of requests for a second and of tokens for ten, it is of no use to come back after one."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60, "requests_per_minute": 60}})
    for _ in range(60):
        tenants.reserve(ticket(1), 0)
    refused = tenants.refusal(ticket(10), 0)
    assert refused is not None
    assert refused.retry_after_ns == 10 * SECOND
    assert "60 tokens per minute" in refused.detail
    refused = tenants.refusal(ticket(0), 0)
    assert refused is not None
    assert refused.retry_after_ns == SECOND
    assert "60 requests per minute" in refused.detail


def test_a_refusal_names_the_limit_and_the_wait() -> None:
    """It says which limit of which tenant, that it is the tenant's own, and when there is enough."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 600}})
    tenants.reserve(ticket(600), 0)
    refused = tenants.refusal(ticket(100), 0)
    assert refused == Refusal(
        Outcome.REJECTED_RATE,
        "the limit of 600 tokens per minute of tenant 'a' could pay this request in about 10 s",
        10 * SECOND,
        by_tenant_limit=True,
    )
    assert tenants.refusal(ticket(100), 10 * SECOND - 1) is not None
    assert tenants.refusal(ticket(100), 10 * SECOND) is None


@pytest.mark.parametrize("limit", ["tokens_per_minute", "requests_per_minute"])
def test_zero_lets_nothing_pass_and_no_limit_everything(limit: str) -> None:
    """0 is a limit, None is none; a wait helps against neither."""
    tenants = limited(tenants={"none": {limit: 0}, "free": {}})
    refused = tenants.refusal(ticket(1, "none"), 10**15)
    assert refused is not None
    assert refused.retry_after_ns is None
    assert "lets nothing pass" in refused.detail
    for tenant in ("free", "unknown"):
        for _ in range(100):
            one = ticket(10**9, tenant)
            assert tenants.refusal(one, 0) is None
            tenants.reserve(one, 0)
        assert left(tenants, tenant) == (None, None)


def test_what_costs_nothing_passes_a_limit_of_tokens() -> None:
    """A class of weight 0 is free of it, but not past a limit of 0."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 5}, "none": {"tokens_per_minute": 0}})
    tenants.reserve(ticket(5), 0)
    assert tenants.refusal(ticket(0), 0) is None
    assert tenants.refusal(ticket(0, "none"), 0) is not None


def test_a_cost_above_the_minute_needs_a_full_bucket_and_leaves_a_debt() -> None:
    """A millisecond short of full it must wait, and afterwards the long-run rate holds."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60}})
    tenants.reserve(ticket(1), 0)
    large = ticket(180)
    refused = tenants.refusal(large, 0)
    assert refused is not None
    assert refused.retry_after_ns == SECOND
    assert tenants.refusal(large, SECOND) is None
    tenants.reserve(large, SECOND)
    assert left(tenants, now=SECOND)[0] == -120
    assert tenants.refusal(ticket(1), 121 * SECOND) is not None
    assert tenants.refusal(ticket(1), 122 * SECOND) is None


def test_places_of_a_key() -> None:
    """Each request inside counts for its key; over the limit it is told to try again soon."""
    tenants = limited(keys={"k": 2, "shut": 0}, tenants={"a": {"requests_per_minute": 10}})
    inside = [ticket(key="k"), ticket(key="k")]
    for one in inside:
        assert tenants.refusal(one, 0) is None
        tenants.reserve(one, 0)
    refused = tenants.refusal(ticket(key="k"), 0)
    assert refused is not None
    assert (refused.outcome, refused.by_tenant_limit) == (Outcome.REJECTED_RATE, True)
    assert refused.retry_after_ns is not None
    assert left(tenants) == (None, 8)  # who is refused for this has not used up a request
    assert tenants.refusal(ticket(key="other"), 0) is None
    assert tenants.refusal(ticket(), 0) is None
    shut = tenants.refusal(ticket(key="shut"), 0)
    assert shut is not None
    assert shut.retry_after_ns is None
    tenants.settle(inside[0], 0, 0)
    assert tenants.key_places.in_flight("k") == 1
    assert tenants.refusal(ticket(key="k"), 0) is None


def test_asking_remembers_nobody() -> None:
    """Neither names of keys nor of tenants that have no limits are kept once their requests have ended."""
    tenants = limited(keys={"k": 2})
    for i in range(100):
        one = ticket(1, f"tenant {i}", f"key {i}")
        assert tenants.refusal(one, 0) is None
        assert tenants.key_places.in_flight(f"key {i}") == 0
        tenants.reserve(one, 0)
        tenants.settle(one, 0, 0)
    assert (len(tenants._tenants), len(tenants.key_places._in_flight)) == (0, 0)


@pytest.mark.parametrize(("actual", "tokens", "requests"), [(None, 100, 5), (0, 100, 4), (30_000, 70, 4)])
def test_an_ending_settles_once(actual: int | None, tokens: int, requests: int) -> None:
    """Nothing ran: all is given back; something ran: the request counts and what it used is paid; a second
    ending is none."""
    tenants = limited(keys={"k": 1}, tenants={"a": {"tokens_per_minute": 100, "requests_per_minute": 5}})
    one = ticket(50, key="k")
    tenants.reserve(one, 0)
    assert left(tenants) == (50, 4)
    for _ in range(3):
        tenants.settle(one, actual, 0)
        assert left(tenants) == (tokens, requests)
        assert tenants.key_places.in_flight("k") == 0


def test_more_than_estimated_is_a_debt_with_a_bound() -> None:
    """Used four times what was set aside: taken at settlement, as far as the debt may go."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60}}, capacity={"max_debt_seconds": 20.0})
    for used, remains in ((50, 10), (70, -10), (1000, -20)):
        one = ticket(20)
        later = next(_seq) * 100 * MINUTE_NS
        tenants.reserve(one, later)
        tenants.settle(one, used * 1000, later)
        assert left(tenants, now=later)[0] == remains


def test_what_would_be_refused_is_not_charged_but_inside() -> None:
    """Observed: it holds a place of its key and nothing else, and so at its end."""
    tenants = limited(keys={"k": 5}, tenants={"a": {"tokens_per_minute": 100, "requests_per_minute": 5}})
    one = ticket(50, key="k")
    tenants.reserve(one, 0, charge=False)
    assert left(tenants) == (100, 5)
    assert tenants.key_places.in_flight("k") == 1
    tenants.settle(one, None, 0)
    assert left(tenants) == (100, 5)
    assert tenants.key_places.in_flight("k") == 0


def test_forgiven_is_uncharged_and_still_inside() -> None:
    """The charge comes back once, the place of the key stays taken until the end."""
    tenants = limited(keys={"k": 5}, tenants={"a": {"tokens_per_minute": 100, "requests_per_minute": 5}})
    other, one = ticket(20), ticket(50, key="k")
    tenants.reserve(other, 0)
    tenants.reserve(one, 0)
    for _ in range(2):
        tenants.forgive(one, 0)
        assert left(tenants) == (80, 4)
        assert tenants.key_places.in_flight("k") == 1
    tenants.settle(one, None, 0)
    assert left(tenants) == (80, 4)
    assert tenants.key_places.in_flight("k") == 0


# ---------------------------------------------------------------------- other limits while running


def set_to(tenants: TenantLimits, now: int, limits: dict[str, Any] | None, **given: Any) -> None:
    tenants.reconfigure(policy(tenants={} if limits is None else {"a": limits}, **given), now)


def test_new_limits_keep_what_was_used() -> None:
    """A larger minute is not refilled, a smaller one is cut, and what flows in is what is set now."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60, "requests_per_minute": 10}})
    tenants.reserve(ticket(40), 0)
    set_to(tenants, 0, {"tokens_per_minute": 600, "requests_per_minute": 5})
    assert left(tenants) == (20, 5)
    assert left(tenants, now=SECOND)[0] == 30
    set_to(tenants, SECOND, {"tokens_per_minute": 12, "requests_per_minute": 5})
    assert left(tenants, now=SECOND)[0] == 12


def test_a_debt_survives_new_limits() -> None:
    """Who owes still owes after a reload."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60}})
    tenants.reserve(ticket(180), 0)
    set_to(tenants, 0, {"tokens_per_minute": 120})
    assert left(tenants)[0] == -120
    set_to(tenants, 0, {"tokens_per_minute": 0})
    assert left(tenants, now=SECOND)[0] == -120
    set_to(tenants, SECOND, {"tokens_per_minute": 120})
    assert left(tenants, now=61 * SECOND)[0] == 0


def test_what_was_not_charged_is_not_settled() -> None:
    """A request let in before there was a limit owes nothing to the one that came meanwhile."""
    tenants = limited()
    one = ticket(10)
    tenants.reserve(one, 0)
    set_to(tenants, 0, {"tokens_per_minute": 60, "requests_per_minute": 5})
    tenants.settle(one, 50_000, 0)
    assert left(tenants) == (60, 5)


def test_a_limit_taken_away_is_forgotten() -> None:
    """Requests charged under it end well, and a tenant that is no longer named leaves nothing behind."""
    tenants = limited(tenants={"a": {"tokens_per_minute": 60, "requests_per_minute": 5}}, keys={"k": 1})
    one = ticket(10, key="k")
    tenants.reserve(one, 0)
    set_to(tenants, 0, None)
    assert tenants.refusal(ticket(10**6, key="k"), 0) is None
    assert tenants.tokens_per_minute("a") is None
    tenants.settle(one, 20_000, 0)
    assert left(tenants) == (None, None)
    assert tenants.key_places.in_flight("k") == 0
    assert len(tenants._tenants) == 0


def test_new_places_of_a_key_count_those_inside() -> None:
    """Lowered below what is inside it refuses until enough have ended; raised it lets more in at once."""
    tenants = limited(keys={"k": 3})
    inside = [ticket(key="k") for _ in range(3)]
    for one in inside:
        tenants.reserve(one, 0)
    set_to(tenants, 0, None, keys={"k": 2})
    tenants.settle(inside[0], None, 0)
    assert tenants.refusal(ticket(key="k"), 0) is not None
    tenants.settle(inside[1], None, 0)
    assert tenants.refusal(ticket(key="k"), 0) is None
    set_to(tenants, 0, None, keys={"k": 1})
    assert tenants.refusal(ticket(key="k"), 0) is not None


# ---------------------------------------------------------------------- all of it against an oracle


@dataclass
class Books:
    """What the tenants and keys must hold, in fractions."""

    parameters: PolicyParameters
    tokens: dict[str, ExactMinute] = field(default_factory=dict)
    requests: dict[str, ExactMinute] = field(default_factory=dict)
    inside: Counter[str] = field(default_factory=Counter)
    charged: dict[int, int] = field(default_factory=dict)  # seq → thousandths of a token

    def __post_init__(self) -> None:
        for name, set_ in self.parameters.tenants.items():
            if set_.tokens_per_minute is not None:
                self.tokens[name] = ExactMinute(set_.tokens_per_minute)
            if set_.requests_per_minute is not None:
                self.requests[name] = ExactMinute(set_.requests_per_minute)

    def run(self, now: int) -> None:
        for bucket in (*self.tokens.values(), *self.requests.values()):
            bucket.run(now)

    def allows(self, one: Ticket) -> bool:
        tenant, key = one.ask.tenant, one.ask.key
        limit = self.parameters.key_max_in_flight.get(key or "")
        return (
            (limit is None or self.inside[key or ""] < limit)
            and (tenant not in self.requests or self.requests[tenant].affords(1000))
            and (tenant not in self.tokens or self.tokens[tenant].affords(one.cost))
        )

    def reserve(self, one: Ticket) -> None:
        self.inside[one.ask.key or ""] += 1
        self.charged[one.seq] = one.cost
        if one.ask.tenant in self.requests:
            self.requests[one.ask.tenant].take(1000)
        if one.ask.tenant in self.tokens:
            self.tokens[one.ask.tenant].take(one.cost)

    def settle(self, one: Ticket, actual: int | None) -> None:
        if one.seq not in self.charged:
            return
        cost = self.charged.pop(one.seq)
        self.inside[one.ask.key or ""] -= 1
        if actual is None and one.ask.tenant in self.requests:
            self.requests[one.ask.tenant].give(1000)
        if one.ask.tenant in self.tokens and cost:  # a class without weight costs nothing at its end either
            bucket, used = self.tokens[one.ask.tenant], actual or 0
            if used <= cost:
                bucket.give(cost - used)
            else:
                bucket.debit(used - cost, Fraction(self.parameters.capacity.max_debt_seconds))


LIMITED = policy(
    capacity={"max_debt_seconds": 7.5},
    tenants={
        "a": {"tokens_per_minute": 600, "requests_per_minute": 20},
        "b": {"tokens_per_minute": 97},
        "c": {"requests_per_minute": 3},
        "none": {"tokens_per_minute": 0},
        "free": {},
    },
    keys={"k": 2, "l": 5, "shut": 0},
)


@pytest.mark.parametrize("seed", range(5))
def test_any_traffic_adds_up(seed: int) -> None:
    """Over thousands of arrivals and endings, some told twice: the same decisions and levels as in exact
    arithmetic, and at the end nobody inside."""
    chance = random.Random(seed)
    tenants, books, now = TenantLimits(LIMITED, 0), Books(LIMITED), 0
    inside: list[Ticket] = []
    met = Counter[bool]()
    for _ in range(3000):
        now += chance.choice([0, 0, 1, 999_983, SECOND // 3, SECOND, 5 * SECOND])
        books.run(now)
        if chance.random() < 0.55:
            one = ticket(
                chance.choice([0, 1, 3, 20, 99, 700]),
                chance.choice(["a", "a", "b", "c", "none", "free", "unknown"]),
                chance.choice(["k", "l", "m", "shut", None]),
            )
            refusal = tenants.refusal(one, now)
            assert (refusal is None) == books.allows(one)
            met[refusal is None] += 1
            if refusal is None:
                tenants.reserve(one, now)
                books.reserve(one)
                inside.append(one)
        elif inside:
            one = chance.choice(inside)
            actual = chance.choice([None, 0, 1000, 30_000, 10**6])
            tenants.settle(one, actual, now)
            books.settle(one, actual)
            if chance.random() < 0.8:
                inside.remove(one)  # otherwise it may end once more
        _agree(tenants, books, now)
    for one in inside:
        tenants.settle(one, None, now)
        books.settle(one, None)
    _agree(tenants, books, now)
    assert not tenants.key_places._in_flight
    assert min(met.values()) > 300


def _agree(tenants: TenantLimits, books: Books, now: int) -> None:
    for tenant in ("a", "b", "c", "none", "free", "unknown"):
        tokens, requests = left(tenants, tenant, now)
        assert tokens == (books.tokens[tenant].level if tenant in books.tokens else None)
        assert requests == (books.requests[tenant].level if tenant in books.requests else None)
    for key in ("k", "l", "m", "shut"):
        assert tenants.key_places.in_flight(key) == books.inside[key]


def test_a_minute_holds_what_it_says_for_fractions_of_a_second() -> None:
    """Seven a minute: one each 60/7 s, rounded up to the nanosecond at which it is there."""
    bucket = MinuteBucket(7, 0)
    bucket.take(7000)
    assert bucket.wait_ns(1000) == -(-MINUTE_NS // 7) == nanoseconds(60 / 7) + 1
