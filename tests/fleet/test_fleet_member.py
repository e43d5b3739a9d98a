"""A gateway joins the fleet before it listens, and leaves it when it ends: on virtual time, with a store of
the test's own."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import pytest
import structlog

from gateway.api import fleet_member
from gateway.api.fleet_member import FleetMember, fleet_rules
from gateway.fleet.contract import State
from gateway.fleet.ledger import Ledger
from gateway.fleet.messages import Granted, Renewal
from gateway.fleet.store import Reason, StoreFailed
from gateway.policy.admission import Admission
from gateway.runtime.admission_gate import AdmissionGate
from gateway.settings import FleetSettings
from gateway.telemetry.fleet_gauges import CALL_RESULTS, STATES
from tests.support.policy_settings import P0, ask, policy, upstream
from tests.support.virtual_loop import VirtualLoop, virtual_loop

MADE = policy(upstream("gpu", tokens_per_second=1000, max_in_flight=30))


class FakeStore:
    """A ledger that answers within a millisecond, fails, or breaks in a way that nobody has thought of."""

    def __init__(self, ledger: Ledger, member: str, loop: VirtualLoop) -> None:
        self._ledger, self._member, self._loop = ledger, member, loop
        self.failure: Callable[[], Exception] | None = None
        self.swallows = False
        self.said: list[str] = []
        self.renewals: list[Renewal] = []

    async def renew(self, renewal: Renewal) -> tuple[Granted, Sequence[str]]:
        self.said.append("renew")
        self.renewals.append(renewal)
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            if not self.swallows:
                raise
        if self.failure is not None:
            raise self.failure()
        return self._ledger.renew(round(self._loop.time() * 1e6), self._member, renewal), ()

    async def leave(self) -> None:
        self.said.append("leave")
        if self.failure is not None:
            raise self.failure()
        self._ledger.leave(self._member)

    async def close(self) -> None:
        self.said.append("close")
        if self.failure is not None:
            raise self.failure()


class Scene:
    def __init__(self, loop: VirtualLoop, patch: pytest.MonkeyPatch) -> None:
        self.loop, self.ledger, self.calls = loop, Ledger(), list[tuple[str, float]]()
        self.stores: list[FakeStore] = []

        def store(url: str, member: str, fleet: str, seconds: float) -> FakeStore:
            self.stores.append(FakeStore(self.ledger, member, loop))
            return self.stores[-1]

        patch.setattr(fleet_member, "SharedBudget", store)
        self.admissions: list[Admission] = []

    def member(self, **given: Any) -> FleetMember:
        self.admissions.append(Admission(MADE, self.loop.clock))
        gate = AdmissionGate(self.admissions[-1], self.loop.clock, self.loop)
        made = FleetMember("redis://nowhere", FleetSettings(**given), gate, self.loop.clock)
        made.on_call = lambda result, seconds: self.calls.append((result, seconds))
        return made

    def capacity(self, index: int = 0) -> int:
        return self.admissions[index].pools[0].buckets.capacity

    def runs(self, *work: Any, seconds: float = 0) -> None:
        for each in work:
            self.loop.run_until_complete(asyncio.wait_for(each, 5))
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with virtual_loop() as loop:
        loop.clock.advance(1000)
        yield Scene(loop, monkeypatch)


def unreachable() -> Exception:
    return StoreFailed("unreachable", "nobody there")


def unheard_of() -> Exception:
    return ValueError("what is this?")


def test_the_rules_are_those_of_the_settings() -> None:
    """Each by its name."""
    made = fleet_rules(
        FleetSettings(slice_seconds=0.2, lease_seconds=20, call_seconds_max=0.4, replicas_assumed=5)
    )
    assert (made.slice_seconds, made.lease_seconds, made.call_seconds_max) == (0.2, 20, 0.4)
    assert made.replicas_assumed == 5


@pytest.mark.parametrize(
    ("slice_seconds", "call_seconds_max"), [(0.1, 0.5), (0.001, 0.001), (0.01, 0.2), (0.5, 0.1), (0.1, 5.0)]
)
def test_the_shortest_lease_that_may_be_set_leaves_time_to_hold(
    slice_seconds: float, call_seconds_max: float
) -> None:
    """It is over for the replica itself only after it has noticed that the store is silent, and after two
    slices with a call that times out have not yet done it any harm."""
    for tenths in range(1, 1000):
        try:
            settings = FleetSettings(
                slice_seconds=slice_seconds, call_seconds_max=call_seconds_max, lease_seconds=tenths / 10
            )
        except ValueError:
            continue
        break
    rules = fleet_rules(settings)
    assert rules.own_lease_seconds > rules.holding_after_seconds
    assert rules.own_lease_seconds > 2 * slice_seconds + call_seconds_max


def test_it_has_its_share_once_it_has_joined(scene: Scene) -> None:
    """And from then on calls in each slice; each call is told of."""
    member = scene.member()
    scene.runs(member.join())
    assert (member.state, member.replicas, member.leads) == ("shared", 1, True)
    assert scene.calls == [("ok", pytest.approx(0.001))]
    assert scene.capacity() == pytest.approx(1_000_000, rel=1e-4)
    scene.runs(seconds=2)
    assert 17 <= len(scene.calls) <= 24


def test_without_a_store_it_begins_with_its_part_of_those_assumed(scene: Scene) -> None:
    """And says so once, with the reason."""
    member = scene.member(replicas_assumed=4)
    scene.stores[0].failure = unreachable
    with structlog.testing.capture_logs() as logs:
        scene.runs(member.join(), seconds=3)
    assert (member.state, member.replicas, scene.capacity()) == ("joining", 4, 250_000)
    assert {result for result, _ in scene.calls} == {"unreachable"}
    (line,) = logs
    assert (line["log_level"], line["reason"], line["message"]) == ("warning", "unreachable", "nobody there")
    assert line["replicas_assumed"] == 4
    scene.stores[0].failure = None
    scene.runs(seconds=1)
    assert member.state == "shared"


def test_each_change_is_one_line_of_the_log(scene: Scene) -> None:
    """Holding and back among others are no errors; alone is one."""
    member = scene.member()
    scene.runs(member.join(), seconds=1)
    with structlog.testing.capture_logs() as logs:
        scene.stores[0].failure = unreachable
        scene.runs(seconds=15)
        assert member.state == "alone"
        scene.stores[0].failure = None
        scene.runs(seconds=1)
    assert [line["log_level"] for line in logs] == ["warning", "error", "info"]
    assert [line["before"] for line in logs] == ["shared", "holding", "alone"]
    assert [line.get("message") for line in logs] == ["nobody there", "nobody there", None]


def test_another_reason_for_the_silence_is_said_once_more(scene: Scene) -> None:
    """It is no change of state, and the line does not look like one."""
    member = scene.member()
    scene.runs(member.join(), seconds=1)
    with structlog.testing.capture_logs() as logs:
        scene.stores[0].failure = unreachable
        scene.runs(seconds=3)
        scene.stores[0].failure = lambda: StoreFailed("denied", "no such user")
        scene.runs(seconds=3)
    assert [line["reason"] for line in logs] == ["unreachable", "denied"]
    assert "before" not in logs[1]
    assert (logs[1]["state"], logs[1]["message"]) == ("holding", "no such user")


def test_what_nobody_has_thought_of_is_a_silence_like_any_other(scene: Scene) -> None:
    """Logged with its trace once: when its lease is over the gateway has its part, the other one what it had,
    and when all is well again they share."""
    member, other = scene.member(), scene.member()
    scene.runs(member.join(), other.join(), seconds=1)
    for each in range(3):
        scene.admissions[0].submit(ask(f"{each}", P0, 1000))
    scene.runs(seconds=0.5)
    assert scene.capacity(0) > 600_000
    scene.stores[0].failure = unheard_of
    with structlog.testing.capture_logs() as logs:
        scene.runs(seconds=9.9)
        assert (member.state, other.state) == ("alone", "shared")
        assert scene.capacity(0) + scene.capacity(1) <= 1_000_000
        scene.runs(seconds=5)
    assert scene.capacity(0) == 500_000
    assert [bool(line.get("exc_info")) for line in logs] == [True, False, False]
    assert [line.get("reason") for line in logs] == [None, "error", "error"]
    assert logs[1]["message"] == "ValueError: what is this?"
    scene.stores[0].failure = None
    scene.runs(seconds=3)
    assert (member.state, other.state) == ("shared", "shared")
    assert scene.capacity(0) + scene.capacity(1) <= 1_000_000


def test_it_joins_whatever_happens(scene: Scene) -> None:
    """A first call that fails as nobody has thought of is a store that was not reached."""
    member = scene.member(replicas_assumed=4)
    scene.stores[0].failure = unheard_of
    with structlog.testing.capture_logs() as logs:
        scene.runs(member.join())
    assert (member.state, scene.capacity()) == ("joining", 250_000)
    assert [line.get("reason") for line in logs] == [None, "error"]
    scene.stores[0].failure = None
    scene.runs(seconds=1)
    assert member.state == "shared"


def test_two_share_until_one_leaves(scene: Scene) -> None:
    """Then the other one has all, at once and not only when the lease is over."""
    first, second = scene.member(), scene.member()
    scene.runs(first.join(), second.join(), seconds=2)
    assert first.name != second.name
    assert (first.replicas, second.replicas) == (2, 2)
    assert scene.capacity(0) + scene.capacity(1) <= 1_000_000
    scene.runs(first.leave(), seconds=1)
    assert scene.stores[0].said[-2:] == ["leave", "close"]
    assert second.replicas == 1
    assert scene.capacity(1) == pytest.approx(1_000_000, rel=1e-4)


def test_one_that_drains_asks_for_nothing_and_leads_no_longer(scene: Scene) -> None:
    """Another one leads within a slice or two; its places stay until it has left."""
    first, second = scene.member(), scene.member()
    scene.runs(first.join(), second.join(), seconds=1)
    assert (first.leads, second.leads) == (True, False)
    scene.admissions[0].submit(ask("a", P0))
    first.leave_off()
    scene.runs(seconds=1)
    assert (first.leads, second.leads) == (False, True)
    last = scene.stores[0].renewals[-1]
    assert not last.wants_lead
    assert all(flows == () for pool in last.demand.pools for flows in pool.flows)
    assert last.demand.places[0].in_use == 1


@pytest.mark.parametrize("failure", [None, unreachable, unheard_of])
def test_after_it_has_left_it_calls_no_more(scene: Scene, failure: Callable[[], Exception] | None) -> None:
    """Whether the store hears of it or not, and whatever goes wrong; nothing of it reaches who ends it."""
    member = scene.member()
    scene.runs(member.join(), seconds=1)
    scene.stores[0].failure = failure
    scene.runs(member.leave())
    assert scene.stores[0].said[-2:] == ["leave", "close"]
    scene.runs(seconds=20)
    assert scene.stores[0].said[-1] == "close"


def test_it_leaves_also_where_a_cancellation_is_swallowed(scene: Scene) -> None:
    """As a client of the store may do that is just writing; nothing spins for ever then."""
    member = scene.member()
    scene.runs(member.join(), seconds=1)
    store = scene.stores[0]
    store.swallows = True
    calls = len(store.said)
    while len(store.said) == calls:
        scene.runs(seconds=0.0005)
    scene.runs(member.leave())
    assert store.said[-1] == "close"


def test_one_that_never_joined_can_leave(scene: Scene) -> None:
    """A start that failed before."""
    scene.runs(scene.member().leave())
    assert scene.stores[0].said == ["leave", "close"]


def test_telemetry_knows_every_state_and_every_result() -> None:
    """It may not import the fleet: a state or a reason that it has not heard of would be a KeyError there."""
    assert set(STATES) == {state.value for state in State}
    assert set(CALL_RESULTS) == {"ok", *get_args(Reason)}
