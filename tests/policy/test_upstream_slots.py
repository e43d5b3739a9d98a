"""Places at one upstream."""

from typing import Any

import pytest

from gateway.policy.parameters import SchedulingParameters
from gateway.policy.request import Priority, Ticket
from gateway.policy.upstream_slots import Admits, UpstreamSlots
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, upstream

SHORT_PREFILL = {"long_prompt_tokens": 8192, "max_pending_prefill_tokens": 4096}


def slots(scheduling: dict[str, Any] | None = None, **given: Any) -> UpstreamSlots:
    given = {"max_in_flight": None, **given}
    return UpstreamSlots(upstream(**given), SchedulingParameters(**{**SHORT_PREFILL, **(scheduling or {})}))


_seq = iter(range(10**9))


def ticket(priority: Priority = P1, tokens: int = 10, output: int = 0) -> Ticket:
    made = Ticket(next(_seq), ask("r", priority, tokens), 0)
    made.total_tokens = tokens + output
    made.is_long = tokens > 8192
    return made


def fill(upstream_slots: UpstreamSlots, *tickets: Ticket, now: int = 0, prefilled: bool = True) -> None:
    for one in tickets:
        upstream_slots.lease(one, now)
        if prefilled:
            upstream_slots.prefilled(one)


def admits(s: UpstreamSlots, t: Ticket, holdback: float = 1.0, now: float = 0, **given: Any) -> Admits:
    return s.admits(t, holdback, given.pop("limited", False), nanoseconds(now), **given)


@pytest.mark.parametrize(
    ("limit", "holdback", "places"),
    [
        (10, 1.0, 10),
        (10, 0.9, 9),
        (10, 0.7, 7),
        (4, 0.7, 3),
        (3, 0.7, 3),
        (1, 0.7, 1),
        (1, 0.01, 1),
        (128, 0.9, 116),
        (100, 0.29, 29),
        (0, 1.0, 0),
        (0, 0.5, 0),
    ],
)
def test_a_class_may_fill_its_part_of_the_places(limit: int, holdback: float, places: int) -> None:
    """⌈holdback × limit⌉ places, at least one; a limit of 0 lets nothing pass."""
    s = slots(max_in_flight=limit)
    got = 0
    while admits(s, ticket(), holdback) is Admits.YES:
        fill(s, ticket())
        got += 1
    assert got == places
    assert admits(s, ticket(), holdback) is Admits.NO_ROOM


def test_no_limit_is_no_limit() -> None:
    """`None` admits any number, of any size."""
    s = slots()
    for _ in range(1000):
        assert admits(s, ticket(tokens=4000)) is Admits.YES
        fill(s, ticket(tokens=4000))


def test_tokens_in_flight_are_limited_like_places() -> None:
    """Input and reserved output of all in flight stay within the class's part of the token limit."""
    s = slots(max_in_flight_tokens=1000)
    fill(s, ticket(tokens=300, output=300))
    assert admits(s, ticket(tokens=400), 1.0) is Admits.YES
    assert admits(s, ticket(tokens=401), 1.0) is Admits.NO_ROOM
    assert admits(s, ticket(tokens=100), 0.7) is Admits.YES
    assert admits(s, ticket(tokens=101), 0.7) is Admits.NO_ROOM


def test_a_request_above_the_token_limit_goes_alone() -> None:
    """One larger than the limit is admitted to an empty upstream, and nobody beside it."""
    s = slots(max_in_flight_tokens=1000)
    small, large = ticket(), ticket(tokens=5000)
    fill(s, small)
    assert admits(s, large) is Admits.NO_ROOM
    s.release(small)
    assert admits(s, large, 0.7) is Admits.YES
    fill(s, large)
    assert admits(s, ticket(tokens=1)) is Admits.NO_ROOM
    s.release(large)
    assert admits(s, ticket(tokens=1)) is Admits.YES


def test_a_token_limit_of_nothing_lets_nothing_pass() -> None:
    """0 is not `no limit`, and nobody goes alone past it."""
    assert admits(slots(max_in_flight_tokens=0), ticket()) is Admits.NO_ROOM


def test_down_is_down_for_everybody() -> None:
    """An upstream that is down admits nobody, promoted or not."""
    s = slots()
    s.healthy = False
    assert admits(s, ticket(P0)) is Admits.DOWN
    assert admits(s, ticket(P2), lifted=True) is Admits.DOWN


def test_a_promotion_lifts_holdback() -> None:
    """One who is promoted may take the last place, but not more than there are."""
    s = slots(max_in_flight=2)
    fill(s, ticket())
    assert admits(s, ticket(P2), 0.5) is Admits.NO_ROOM
    assert admits(s, ticket(P2), 0.5, lifted=True) is Admits.YES
    fill(s, ticket())
    assert admits(s, ticket(P2), 0.5, lifted=True) is Admits.NO_ROOM


def test_pending_prefill_holds_back_all_but_p0() -> None:
    """Below P0 the prompts sent without a first token stay within the limit; a larger prompt goes alone."""
    s = slots()
    first = ticket(tokens=3000)
    fill(s, first, prefilled=False)
    assert admits(s, ticket(P1, 1096)) is Admits.YES
    assert admits(s, ticket(P1, 1097)) is Admits.NO_PREFILL_ROOM
    assert admits(s, ticket(P2, 1097)) is Admits.NO_PREFILL_ROOM
    assert admits(s, ticket(P0, 30000)) is Admits.YES
    assert admits(s, ticket(P1, 5000)) is Admits.NO_PREFILL_ROOM
    s.prefilled(first)
    assert admits(s, ticket(P1, 5000)) is Admits.YES


def test_lane_takes_one_long_prompt_below_p0() -> None:
    """Below P0 one long prompt at a time is between dispatch and first token."""
    s = slots({"max_pending_prefill_tokens": 10**9})
    first = ticket(P2, 9000)
    fill(s, first, prefilled=False)
    assert admits(s, ticket(P1, 9000)) is Admits.LANE_TAKEN
    assert admits(s, ticket(P1, 9000), lifted=True) is Admits.LANE_TAKEN
    assert admits(s, ticket(P0, 9000)) is Admits.YES
    assert admits(s, ticket(P1, 8192)) is Admits.YES
    s.prefilled(first)
    assert admits(s, ticket(P1, 9000)) is Admits.YES


@pytest.mark.parametrize("lane", [0, 2])
def test_lane_of_other_widths(lane: int) -> None:
    """A lane of two takes two, one of nothing takes none."""
    s = slots({"long_prompt_lane": lane, "max_pending_prefill_tokens": 10**9})
    for _ in range(lane):
        assert admits(s, ticket(P1, 9000)) is Admits.YES
        fill(s, ticket(P1, 9000), prefilled=False)
    assert admits(s, ticket(P1, 9000)) is Admits.LANE_TAKEN


def test_p0_does_not_take_the_lane() -> None:
    """A long prompt of P0 leaves the lane to the others."""
    s = slots({"max_pending_prefill_tokens": 10**9})
    fill(s, ticket(P0, 9000), prefilled=False)
    assert admits(s, ticket(P1, 9000)) is Admits.YES


def test_duty_spaces_long_prompts_while_a_higher_class_is_active() -> None:
    """After a long prompt the next one waits predicted prefill / duty, if a higher class is active."""
    s = slots(tokens_per_second=1000)
    fill(s, ticket(P1, 10_000))  # 10 s of prefill at 4 % of the time: every 250 s
    assert admits(s, ticket(P1, 9000), now=249.999, limited=True) is Admits.LANE_TAKEN
    assert admits(s, ticket(P1, 9000), now=250, limited=True) is Admits.YES
    assert admits(s, ticket(P1, 9000), now=1, limited=False) is Admits.YES
    assert admits(s, ticket(P1, 8000), now=1, limited=True) is Admits.YES


def test_lease_and_release_balance() -> None:
    """Whatever is leased is given back, with or without a first token, and a second first token is none."""
    s = slots()
    tickets = [ticket(p, n) for p in Priority for n in (10, 9000)]
    for i, one in enumerate(tickets):
        fill(s, one, prefilled=False)
        if i % 2:
            s.prefilled(one)
            s.prefilled(one)
    assert s.in_flight == [2, 2, 2]
    assert s.in_flight_tokens == 3 * 9010
    assert s.pending_prefill_tokens == 30
    for one in tickets:
        s.release(one)
    assert s.in_flight == [0, 0, 0]
    assert s.in_flight_total == s.in_flight_tokens == s.pending_prefill_tokens == s.long_prefills == 0
