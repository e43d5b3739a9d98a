"""A budget that several gateways share, at one of them: who decides, who follows, what a reload does."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.policy.budget_part import BudgetPart, Parts
from gateway.policy.class_activity import ACTIVE_ELSEWHERE_NS, ACTIVITY_TAIL_NS
from gateway.policy.clock import NEVER
from gateway.policy.control_signals import Measured, Verdict
from gateway.policy.engine_load import EngineLoad
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.pool import Pool
from gateway.policy.request import PRIORITIES, Ticket
from gateway.policy.upstream_slots import Admits
from tests.policy.test_capacity_loop import Scripted
from tests.support.control import parameters
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, policy, upstream

BUDGET = (600_000, 350_000, 50_000)
HALF = tuple(rate // 2 for rate in BUDGET)
NONE_ELSEWHERE = (False, False, False)
GPU0, GPU1 = (upstream(name, tokens_per_second=1000, max_in_flight=30) for name in ("gpu0", "gpu1"))
OTHER = upstream("other", tokens_per_second=400, max_in_flight=30, models=("x",))


def made(*upstreams: Any, law: str = "severity", **given: Any) -> PolicyParameters:
    return replace(parameters(law, **given), upstreams=upstreams or (GPU0,))


class Gateway(VirtualDriver):
    """One of several; `tell` is what it hears, by default its half."""

    def __init__(self, settings: PolicyParameters, *capacities: int | None) -> None:
        super().__init__(settings)
        self.changes: list[Any] = []
        self.endings.rates_changed = self.changes.append  # type: ignore[method-assign]
        self.capacities = capacities
        self.use_script()

    def use_script(self) -> Scripted:
        law = Scripted(*self.capacities)
        self.pool.control.law = law
        return law

    def tell(
        self,
        rates: tuple[int, ...] = HALF,
        *,
        budget: tuple[int, ...] = BUDGET,
        gateways: int = 2,
        pool: str = "gpu0",
        engines: Mapping[str, tuple[int | None, int | None]] | None = None,
        **given: Any,
    ) -> None:
        part = BudgetPart(rates, rates, rates, budget, gateways, **given)
        self.admission.take_parts(Parts(gateways, {pool: part}, engines or {}, {}, {}))
        self.gate.settle()

    @property
    def control(self) -> Any:
        return self.pool.control

    @property
    def in_force(self) -> tuple[int, ...]:
        return tuple(self.pool.buckets.rates)


def heard(at: float, **given: Any) -> Measured:
    nothing: dict[str, Any] = dict.fromkeys(("gap_ns", "gap_tokens", "late_ns", "first_tokens"), 0)
    nothing |= dict.fromkeys(("oldest_late_ns", "kv_usage"))
    nothing |= {"held_back": (True,) * 3, "demand": (0,) * 3, "verdicts": ((),) * 3, "overdue": ((),) * 3}
    return Measured(at=nanoseconds(at), **{**nothing, **given})


# ---------------------------------------------------------------------- who decides


def test_a_follower_puts_its_part_in_force_and_knows_the_budget() -> None:
    """Its own law is not asked, but it measures, so that another one's can be."""
    gateway = Gateway(made(), 700)
    gateway.tell()
    law = gateway.control.law
    gateway.submit("a", P0)
    gateway.run(3)
    assert (gateway.in_force, gateway.control.rates) == (HALF, BUDGET)
    assert law.told == []
    assert gateway.control.measured.at == nanoseconds(3)
    assert gateway.changes == []


def test_the_one_that_decides_does_so_on_what_all_have_measured() -> None:
    """Not at its own ticks; and what it has decided is in force once it is given a part of it."""
    gateway = Gateway(made())
    gateway.tell(decides=True)
    gateway.capacities = (800,)
    law = gateway.use_script()
    gateway.submit("a", P0)
    gateway.run(3)
    assert law.told == []
    gateway.admission.pooled({"gpu0": heard(3, kv_usage=0.5)})
    assert [readings.kv_usage for readings in law.told] == [0.5]
    assert sum(gateway.control.rates) == 800_000
    assert gateway.in_force == HALF
    gateway.tell(decides=True)
    assert sum(gateway.control.rates) == 800_000, "the answer to a call that was made before"
    assert [change.new_rates for change in gateway.changes] == [gateway.control.rates]


def test_one_that_does_not_decide_hears_nothing() -> None:
    """Reports for somebody who led a moment ago change nothing."""
    gateway = Gateway(made(), 800)
    gateway.tell()
    gateway.admission.pooled({"gpu0": heard(0), "gone": heard(0)})
    assert gateway.control.rates == BUDGET


def test_who_begins_to_decide_remembers_nothing() -> None:
    """And begins at the budget that the one before it has left."""
    gateway = Gateway(made())
    law = gateway.control.law
    left = (500_000, 200_000, 20_000)
    gateway.tell(budget=left, decides=True)
    assert gateway.control.law is not law
    assert gateway.control.rates == left
    law = gateway.control.law
    gateway.tell(budget=BUDGET, decides=True)
    assert gateway.control.law is law
    assert gateway.control.rates == left
    gateway.tell(budget=BUDGET)
    assert gateway.control.rates == BUDGET


def test_alone_it_decides_at_its_own_ticks() -> None:
    """On what it sees itself, about a part of the last known budget."""
    gateway = Gateway(made())
    gateway.tell(decides=True, alone=True)
    gateway.capacities = (None, 500)
    law = gateway.use_script()
    gateway.submit("a", P0)
    gateway.run(2.5)
    assert len(law.told) == 2
    assert sum(gateway.control.rates) == 500_000
    assert gateway.in_force == HALF


def test_back_among_others_the_budget_of_all_counts() -> None:
    """One that was alone and leads now begins anew, as any that begins to lead."""
    gateway = Gateway(made())
    gateway.tell(decides=True, alone=True)
    gateway.capacities = (500,)
    law = gateway.use_script()
    gateway.run(1.5)
    assert sum(gateway.control.rates) == 500_000
    gateway.tell(decides=True)
    assert gateway.control.rates == BUDGET
    assert gateway.control.law is not law


def test_a_static_budget_is_that_of_who_decides() -> None:
    """What the store still has from before a restart with other settings does not stay for ever."""
    gateway = VirtualDriver(replace(made(law="static"), upstreams=(GPU0,)))
    told = Parts(2, {"gpu0": BudgetPart(HALF, HALF, HALF, (60_000, 35_000, 5_000), 2)}, {}, {}, {})
    gateway.admission.take_parts(told)
    assert gateway.pool.control.rates == (60_000, 35_000, 5_000)
    leads = told._replace(pools={"gpu0": told.pools["gpu0"]._replace(decides=True)})
    gateway.admission.take_parts(leads)
    assert gateway.pool.control.rates == BUDGET


def test_a_budget_beyond_the_bounds_is_brought_back_to_them() -> None:
    """Whoever left it had other engines, or other settings."""
    gateway = Gateway(made())
    gateway.tell(budget=(9_000_000, 0, 0), decides=True)
    assert sum(gateway.control.rates) == 3_000_000
    assert gateway.control.rates[1] >= 100_000


@pytest.mark.parametrize("decides", [False, True])
def test_an_engine_that_goes_down_changes_the_budget_where_it_is_decided(decides: bool) -> None:
    """A follower hears of it from the leader."""
    gateway = Gateway(made(GPU0, GPU1))
    gateway.tell(decides=decides)
    gateway.health("gpu1", False)
    assert sum(gateway.control.rates) == (500_000 if decides else 1_000_000)
    assert gateway.in_force == HALF


def test_a_law_that_only_advises_leaves_the_budget_alone() -> None:
    """Where a class is observed, also for all gateways together."""
    gateway = Gateway(made(classes={P2: {"observe": True}}))
    gateway.tell(decides=True)
    gateway.capacities = (500,)
    gateway.use_script()
    gateway.admission.pooled({"gpu0": heard(1)})
    assert gateway.control.rates == BUDGET
    assert [change.applied for change in gateway.changes] == [False]


def test_it_rests_never_while_it_shares() -> None:
    """Others may have requests where it has none; a static one still need not wake up."""
    for law, rests in (("severity", False), ("static", True)):
        gateway = VirtualDriver(made(law=law))
        gateway.admission.take_parts(Parts(2, {"gpu0": BudgetPart(HALF, HALF, HALF, BUDGET, 2)}, {}, {}, {}))
        gateway.gate.settle()
        gateway.run(50)
        assert (gateway.admission.next_deadline() == NEVER) is rests


# ---------------------------------------------------------------------- what is measured


def test_what_was_measured_stays_as_it_was() -> None:
    """Verdicts that come after the tick belong to the next one: the running numbers say which are new."""
    gateway = Gateway(made())
    gateway.tell()
    signals = gateway.control.signals
    signals.judged(P0, Verdict(0, 1, True))
    gateway.run(1)
    measured = gateway.control.measured
    signals.judged(P0, Verdict(2, 3, False))
    assert measured.verdict_numbers == (1, 0, 0)
    assert [list(of_class) for of_class in measured.verdicts] == [[Verdict(0, 1, True)], [], []]
    gateway.run(2)
    assert gateway.control.measured.verdict_numbers == (2, 0, 0)


# ---------------------------------------------------------------------- activity


def limits_lending(pool: Pool, now: int) -> bool:
    return pool.buckets.limits(now)[P2]


def test_activity_elsewhere_is_not_told_as_ones_own() -> None:
    """Else two idle gateways would keep each other busy for ever."""
    gateway = Gateway(made())
    gateway.tell(active_elsewhere=(True, True, False))
    assert limits_lending(gateway.pool, 0)
    assert [gateway.pool.activity.here(p, 0) for p in PRIORITIES] == [False, False, False]
    gateway.run(1)
    gateway.tell(active_elsewhere=NONE_ELSEWHERE)
    assert not limits_lending(gateway.pool, ACTIVE_ELSEWHERE_NS)


def test_its_own_activity_is_told_until_a_while_after_the_last_request() -> None:
    """Whatever others say meanwhile."""
    gateway = Gateway(made())
    gateway.tell()
    gateway.submit("a", P0)
    assert gateway.pool.activity.here(P0, 0)
    gateway.at(nanoseconds(1), lambda: gateway.finish("a"))
    gateway.run(1)
    gateway.tell(active_elsewhere=(True, True, True))
    last = nanoseconds(1) + ACTIVITY_TAIL_NS
    assert [gateway.pool.activity.here(P0, at) for at in (last - 1, last)] == [True, False]
    assert limits_lending(gateway.pool, last - 1)
    gateway.run(5.9)
    gateway.tell(active_elsewhere=(True, False, False))
    assert limits_lending(gateway.pool, last + 1)
    assert not gateway.pool.activity.here(P0, last)


def test_activity_elsewhere_does_not_shorten_ones_own() -> None:
    """A class with requests here stays active without end."""
    gateway = Gateway(made())
    gateway.submit("a", P0)
    gateway.tell(active_elsewhere=(True, False, False))
    assert gateway.pool.buckets.active_until[P0] == NEVER


# ---------------------------------------------------------------------- places and tokens of engines


@pytest.mark.parametrize(
    ("told", "have"),
    [((12, None), 12), ((0, None), 0), ((99, None), 30), ((None, None), 15)],
)
def test_an_engines_places_are_the_part_that_was_told(told: tuple[int | None, None], have: int) -> None:
    """limit / gateways of one that was not told yet; a part above the limit is the limit."""
    gateway = Gateway(made())
    gateway.tell(engines={"gpu0": told})
    assert gateway.admission.upstream("gpu0").max_in_flight == have


def test_an_engine_without_a_limit_has_none_to_share() -> None:
    """Also where it had one a moment ago; and one that gets a limit has its part at once."""
    gateway = Gateway(made(replace(GPU0, max_in_flight=None)))
    gateway.tell(engines={"gpu0": (7, 7)})
    slots = gateway.admission.upstream("gpu0")
    assert (slots.max_in_flight, slots.max_in_flight_tokens) == (None, None)
    gateway.tell()
    gateway.engine_load("gpu0", EngineLoad(waiting=0, kv_usage=0.1, kv_tokens=1000))
    assert slots.max_in_flight_tokens == 500
    assert slots.whole_limits == (None, 1000)


def test_requests_of_others_are_not_sent_on_places_that_were_taken_away() -> None:
    """Those in flight end where they are; nobody follows until there is room in the new part."""
    gateway = Gateway(made())
    gateway.tell(engines={"gpu0": (3, None)})
    for name in "abcd":
        gateway.submit(name, P0)
    assert len(gateway.log) == 3
    gateway.tell(engines={"gpu0": (1, None)})
    gateway.finish("a")
    gateway.finish("b")
    assert len(gateway.log) == 3
    assert gateway.pool.waiting_for_places(P0) == (1, 1)
    gateway.finish("c")
    assert [name for _, name, _ in gateway.log] == ["a", "b", "c", "d"]


def test_a_larger_part_lets_those_go_that_wait() -> None:
    """In the moment it is told."""
    gateway = Gateway(made())
    gateway.tell(engines={"gpu0": (0, None)})
    gateway.submit("a", P0)
    assert gateway.log == []
    gateway.tell(engines={"gpu0": (1, None)})
    assert [name for _, name, _ in gateway.log] == ["a"]


# ---------------------------------------------------------------------- reloads


def test_a_reload_leaves_the_part_in_force() -> None:
    """Rates, bursts and the budget that is known, until the fleet says otherwise."""
    gateway = Gateway(made())
    gateway.tell()
    before = list(gateway.pool.buckets.bursts)
    gateway.reconfigure(made(replace(GPU0, tokens_per_second=5000)))
    assert (gateway.in_force, gateway.control.rates) == (HALF, BUDGET)
    assert gateway.pool.buckets.bursts == before


def test_a_reload_where_it_is_decided_changes_the_budget() -> None:
    """C stays what it was relative to C0, and what is in force here only follows."""
    gateway = Gateway(made())
    gateway.tell(decides=True)
    gateway.reconfigure(made(replace(GPU0, tokens_per_second=2000)))
    assert (gateway.in_force, sum(gateway.control.rates)) == (HALF, 2_000_000)


@pytest.mark.parametrize("decides", [False, True])
def test_a_pool_with_one_engine_more_keeps_its_part_until_it_is_told(decides: bool) -> None:
    """The budget grows where it is decided; of the new engine's places an equal part is there at once."""
    gateway = Gateway(made())
    gateway.tell((500_000, 300_000, 0), engines={"gpu0": (20, None)}, decides=decides)
    gateway.reconfigure(made(GPU0, GPU1))
    assert gateway.pool.name == "gpu0"
    assert gateway.in_force == (500_000, 300_000, 0)
    assert sum(gateway.control.rates) == (2_000_000 if decides else 1_000_000)
    assert [slots.max_in_flight for slots in gateway.pool.slots] == [20, 15]


def test_an_engine_at_another_address_does_not_bring_the_whole_budget() -> None:
    """It is another engine, of a pool that nobody has divided yet, though its name is the same."""
    gateway = Gateway(made())
    gateway.tell()
    gateway.reconfigure(made(replace(GPU0, address="http://elsewhere")))
    assert gateway.in_force == HALF


def test_who_begins_to_decide_goes_by_the_engines_that_it_sees() -> None:
    """A budget that was set for twice the C0, by other settings or while an engine was up, is halved."""
    gateway = Gateway(made())
    twice = tuple(2 * rate for rate in BUDGET)
    gateway.tell(budget=twice, nominal=2_000_000, decides=True)
    assert gateway.control.rates == BUDGET


def test_severity_is_that_of_who_decides() -> None:
    """What a law found before another gateway began to decide is old news."""
    gateway = Gateway(made(law="severity"))
    gateway.tell(decides=True)
    gateway.control.law = SimpleNamespace(severity=2.0, name="severity")
    assert gateway.control.severity == 2.0
    gateway.tell()
    assert gateway.control.severity is None


def test_a_pool_that_lost_an_engine_does_not_keep_its_budget() -> None:
    """Not even where the store is silent and nobody decides."""
    gateway = Gateway(made(GPU0, GPU1))
    gateway.tell((600_000, 350_000, 50_000), budget=(1_200_000, 700_000, 100_000))
    gateway.reconfigure(made(GPU1))
    assert (sum(gateway.in_force), sum(gateway.control.rates)) == (500_000, 1_000_000)


def test_a_new_pool_begins_with_an_equal_part() -> None:
    """Rates, bursts and places; it asks for what comes there from the first request on."""
    gateway = Gateway(made())
    gateway.tell()
    gateway.reconfigure(made(replace(GPU0, models=("m",)), OTHER))
    new = next(pool for pool in gateway.admission.pools if pool.name == "other")
    assert sum(new.buckets.rates) == 200_000
    assert new.slots[0].max_in_flight == 15
    alone = Pool(made(OTHER), new.slots, 0, lambda ticket, now: None)
    for level, burst in zip(new.buckets.levels, alone.buckets.bursts, strict=True):
        assert level <= burst // 2 + 1
    gateway.submit("a", P1, tokens=100, model="x")
    assert new.demand(P1, 0) == {"t": 50_000}
    assert new.control.follows


def test_who_waits_is_not_paid_from_a_budget_that_others_have_too() -> None:
    """A pool that is new for those who wait pays no more than its part of the bursts."""
    gateway = Gateway(made(replace(GPU0, models=("x",), max_in_flight=0)))
    gateway.tell((0, 0, 0))
    for i in range(100):
        gateway.submit(f"r{i}", P1, tokens=100, model="x")
    gateway.reconfigure(made(replace(OTHER, max_in_flight=None)))
    paid = sum(ticket.ask.input_tokens for ticket in gateway.tickets.values() if ticket.paid_at is not None)
    assert paid <= max(gateway.pool.buckets.bursts) / 1e12 + 8192 / 2 + 200


def test_a_second_reload_before_the_fleet_has_answered_changes_nothing_more() -> None:
    """The same settings, the same part."""
    gateway = Gateway(made())
    gateway.tell()
    gateway.reconfigure(made(GPU0, GPU1))
    once = gateway.in_force
    gateway.reconfigure(made(GPU0, GPU1))
    assert (gateway.in_force, sum(gateway.control.rates)) == (once, 1_000_000)


def test_one_that_never_shared_reloads_as_ever() -> None:
    """The whole budget is its own, and all places."""
    gateway = Gateway(made())
    gateway.reconfigure(made(GPU0, GPU1))
    assert sum(gateway.in_force) == 2_000_000
    assert [slots.max_in_flight for slots in gateway.pool.slots] == [30, 30]


def test_parts_of_what_is_not_here_are_passed_over() -> None:
    """Pools, engines, keys and tenants of another version of the settings."""
    gateway = Gateway(made())
    part = BudgetPart(HALF, HALF, HALF, BUDGET, 2)
    gateway.admission.take_parts(
        Parts(2, {"gone": part}, {"gone": (1, 1)}, {"k": 1}, {("t", "tokens"): (1, 1, 0)})
    )
    gateway.submit("a", P0)
    assert len(gateway.log) == 1


# ---------------------------------------------------------------------- observe, drain, demand


def test_what_is_only_observed_asks_for_its_part_and_goes_through() -> None:
    """Without a rate and without a place."""
    gateway = Gateway(replace(policy(GPU0, observe=True), law="static"))
    gateway.tell((0, 0, 0), engines={"gpu0": (0, 0)})
    for i in range(5):
        gateway.submit(f"r{i}", P1, tokens=1000)
    assert len(gateway.log) == 5
    assert gateway.pool.demand(P1, 0) == {"t": 2_500_000}


def test_a_draining_gateway_takes_parts_as_ever() -> None:
    """What it serves goes on; nothing waits that could be let through."""
    gateway = Gateway(made())
    gateway.tell(engines={"gpu0": (1, None)})
    gateway.submit("a", P0)
    gateway.submit("b", P0)
    gateway.drain()
    gateway.tell(engines={"gpu0": (30, None)})
    assert gateway.tickets["b"].outcome is Outcome.REJECTED_DRAINING
    gateway.finish("a")
    assert gateway.pool.demand(P0, 0) == {"t": 1000}
    gateway.run(10)
    assert gateway.pool.demand(P0, nanoseconds(10)) == {}
    assert not any(gateway.pool.activity.here(p, nanoseconds(10)) for p in PRIORITIES)


def test_demand_is_what_requests_have_cost_as_far_as_is_known() -> None:
    """An estimate of ten times the use is corrected when the request ends: else what others could use would
    be asked for in vain."""
    gateway = Gateway(made())
    gateway.tell()
    gateway.submit("a", P0, 1000)
    asked = gateway.pool.demand(P0, 0)
    gateway.finish("a", 100)
    told = gateway.pool.demand(P0, 0)
    assert sum(told.values()) == pytest.approx(0.1 * sum(asked.values()), rel=0.01)


@pytest.mark.parametrize(("tokens", "goes"), [(30_000, False), (150_000, True), (None, True)])
def test_too_large_for_its_part_it_goes_alone_where_others_are_not(tokens: int | None, goes: bool) -> None:
    """A request that fits the engine waits for a larger part of it; it goes with nothing beside it only where
    the part is an equal one at least, which nobody can be given more than."""
    gateway = Gateway(made(replace(GPU0, max_in_flight_tokens=430_000)))
    gateway.tell(gateways=3, engines={"gpu0": (10, tokens)})
    slots = gateway.pool.slots[0]
    large = Ticket(1, ask("large", P0), 0)
    large.total_tokens = 160_000
    assert (slots.admits(large, 1.0, False, 0) is Admits.YES) is goes
