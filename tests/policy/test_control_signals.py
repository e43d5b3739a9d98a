"""What is measured of streams under way, of waits, of demand."""

from dataclasses import dataclass

import pytest

from gateway.policy.control_signals import ControlSignals, Readings, Verdict
from gateway.policy.engine_load import EngineLoad
from gateway.policy.parameters import SchedulingParameters, SloTargets
from gateway.policy.request import Priority, Ticket
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, upstream

MS = 1_000_000
PROMISES = (SloTargets(nanoseconds(1), 60 * MS), SloTargets(nanoseconds(3)), SloTargets())


@dataclass
class Stream:
    """A stream's progress, as a driver would have it."""

    last_token_at: int | None = None
    output_tokens_seen: int = 0
    held_up: bool = False


class Scene:
    """One engine whose predicted prefill is nothing, and what is measured there. Times are milliseconds."""

    def __init__(self, learned: bool = True) -> None:
        self.signals = ControlSignals(0)
        self.slots = UpstreamSlots(upstream(max_in_flight=None), SchedulingParameters())
        self.streams: dict[str, tuple[Ticket, Stream]] = {}
        for _ in range(5 if learned else 4):
            self.slots.prefill.learn(1, 0)

    def send(self, name: str, at: float, priority: Priority = P0, **given: object) -> None:
        ticket = Ticket(len(self.streams), ask(name, priority, **given), round(at * MS))
        ticket.progress = Stream()
        self.slots.lease(ticket, round(at * MS))
        self.streams[name] = ticket, ticket.progress

    def send_long(self, name: str, at: float, tokens: int, paced: bool, *, streaming: bool = True) -> None:
        """A prompt of P2 that counts as long; `paced`: a higher class was active when it was paid."""
        ticket = Ticket(len(self.streams), ask(name, P2, tokens=tokens, streaming=streaming), round(at * MS))
        ticket.is_long, ticket.on_own_share, ticket.progress = True, paced, Stream()
        self.slots.lease(ticket, round(at * MS))
        self.streams[name] = ticket, ticket.progress

    def first(self, name: str, at: float, tokens: int = 1) -> None:
        ticket, stream = self.streams[name]
        stream.last_token_at, stream.output_tokens_seen = round(at * MS), tokens
        ticket.first_token_at = round(at * MS)
        self.signals.first_token(ticket, round(at * MS))
        self.slots.prefilled(ticket)

    def to(self, name: str, at: float, tokens: int, held_up: bool = False) -> None:
        """That many tokens in all by then."""
        _, stream = self.streams[name]
        stream.last_token_at, stream.output_tokens_seen, stream.held_up = round(at * MS), tokens, held_up

    def ends(self, name: str, at: float) -> None:
        ticket, _ = self.streams.pop(name)
        self.signals.stream_ends(ticket, round(at * MS))
        self.slots.release(ticket)

    def read(self, at: float) -> Readings:
        return self.signals.measure([self.slots], PROMISES, round(at * MS)).readings()


def gap_ms(readings: Readings) -> float | None:
    return None if readings.gap_ns is None else readings.gap_ns / MS


def wait_ms(readings: Readings) -> float | None:
    return None if readings.wait_ns is None else readings.wait_ns / MS


# ── gaps ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_token_counts_the_same() -> None:
    """Ninety tokens at 10 ms and ten at 90 ms: 18 ms on average, over the streams of all classes."""
    scene = Scene()
    for name, priority in (("fast", P0), ("slow", P1)):
        scene.send(name, 0, priority)
        scene.first(name, 100)
    scene.to("fast", 1000, 91)
    scene.to("slow", 1000, 11)
    assert gap_ms(scene.read(1000)) == pytest.approx(18)


def test_only_new_tokens_count_and_old_ones_for_three_seconds() -> None:
    """What was measured stays for three readings and is then forgotten."""
    scene = Scene()
    scene.send("a", 0)
    scene.first("a", 0)
    told = []
    for second in range(1, 7):
        scene.to("a", second * 1000, 10 * second + 1 if second < 4 else 20 * second - 29)
        told.append(gap_ms(scene.read(second * 1000)))
    assert told == [100, 100, 100, 75, 60, 50]


def test_a_stream_that_ended_between_two_readings_counts() -> None:
    """Its last tokens were as slow as any."""
    scene = Scene()
    scene.send("a", 0)
    scene.first("a", 100)
    scene.to("a", 500, 11)
    scene.ends("a", 600)
    assert gap_ms(scene.read(1000)) == pytest.approx(40)
    assert gap_ms(scene.read(4000)) is None


def test_a_stalled_engine_is_seen_before_its_next_token() -> None:
    """A stream without a token from one reading to the next counts as one token that took so long."""
    scene = Scene()
    scene.send("a", 0)
    scene.first("a", 900)
    assert gap_ms(scene.read(1000)) is None
    assert gap_ms(scene.read(2000)) == pytest.approx(1100)


def test_several_tokens_a_chunk_and_several_answers_a_request() -> None:
    """Time is for each token of each answer."""
    scene = Scene()
    scene.send("chunks", 0, sequences=1)
    scene.first("chunks", 0, tokens=5)
    scene.to("chunks", 800, 45)
    assert gap_ms(scene.read(1000)) == pytest.approx(20)
    scene = Scene()
    scene.send("four", 0, sequences=4)
    scene.first("four", 0, tokens=4)
    scene.to("four", 800, 84)
    assert gap_ms(scene.read(1000)) == pytest.approx(40)


def test_a_slow_reader_is_no_slow_engine() -> None:
    """While its client takes nothing, a stream is not measured, and the time is not caught up later."""
    scene = Scene()
    for name in ("slow reader", "other"):
        scene.send(name, 0)
        scene.first(name, 0)
    scene.to("other", 1000, 51)
    scene.to("slow reader", 20, 2, held_up=True)
    assert gap_ms(scene.read(1000)) == pytest.approx(20)
    scene.to("other", 9000, 451)
    assert gap_ms(scene.read(9000)) == pytest.approx(20)
    scene.to("slow reader", 9980, 51)
    scene.to("other", 10000, 501)
    assert gap_ms(scene.read(10000)) == pytest.approx(20, abs=0.1)


# ── waits ────────────────────────────────────────────────────────────────────────────────────────────────


def test_waits_of_the_last_two_seconds_less_what_was_predicted() -> None:
    """Their mean; older ones are gone."""
    scene = Scene()
    for name, waited in (("a", 100), ("b", 300)):
        scene.send(name, 0)
        scene.first(name, waited)
    assert wait_ms(scene.read(1000)) == pytest.approx(200)
    assert wait_ms(scene.read(2200)) == pytest.approx(300)
    assert wait_ms(scene.read(2400)) is None


def test_the_oldest_without_a_first_token() -> None:
    """From the second reading on that finds it so; a bunch that is over within a second is no overload."""
    scene = Scene()
    scene.send("stuck", 900)
    assert wait_ms(scene.read(1000)) is None
    scene.send("new", 1900)
    assert wait_ms(scene.read(2000)) == pytest.approx(1100)


def test_what_was_predicted_is_no_wait() -> None:
    """A long prompt takes its time; sooner than predicted is no wait at all."""
    scene = Scene(learned=False)
    for tokens in (1000, 2000, 3000, 4000, 5000):
        scene.slots.prefill.learn(tokens, tokens * MS)
    scene.send("long", 0, tokens=3000)
    assert scene.read(1000).wait_ns == 0
    assert wait_ms(scene.read(3500)) == pytest.approx(500, abs=1)


def test_before_five_samples_nobody_knows_what_a_wait_is() -> None:
    """Neither the oldest nor a mean."""
    scene = Scene(learned=False)
    scene.send("a", 0)
    scene.first("a", 500)
    scene.send("b", 0)
    assert scene.read(1000).wait_ns is None
    assert scene.read(2000).wait_ns is None


def test_plain_answers_are_not_measured() -> None:
    """Nobody sees their first token or their gaps."""
    scene = Scene()
    scene.send("plain", 0, streaming=False)
    for second in range(1, 20):
        readings = scene.read(second * 1000)
        assert (readings.gap_ns, readings.wait_ns) == (None, None)
        assert readings.overdue == [[], [], []]


# ── stalls ───────────────────────────────────────────────────────────────────────────────────────────────


def stalled(*, paced: bool = True, streaming: bool = True) -> Scene:
    """A stream of P0 with a token each 20 ms; at 1100 ms a P2 prompt that is predicted to take two seconds
    stops it, and somebody is sent at 1500 ms."""
    scene = Scene(learned=False)
    for tokens in (1000, 2000, 3000, 4000, 5000):
        scene.slots.prefill.learn(tokens, tokens * MS)
    scene.send("talks", 0)
    scene.first("talks", 0)
    scene.to("talks", 1000, 51)
    assert gap_ms(scene.read(1000)) == pytest.approx(20)
    scene.to("talks", 1100, 56)
    assert gap_ms(scene.read(1100)) == pytest.approx(20)
    scene.send_long("long", 1100, 2000, paced, streaming=streaming)
    scene.send("behind", 1500)
    return scene


def test_a_long_prompts_stall_is_in_no_signal() -> None:
    """Neither the streams that it stops nor those who are sent meanwhile: no smaller C would help them."""
    scene = stalled()
    told = [scene.read(2000), scene.read(3000)]
    scene.first("long", 3100)
    scene.first("behind", 3200)
    scene.to("talks", 3300, 57)
    told.append(scene.read(4000))
    assert [gap_ms(readings) for readings in told] == pytest.approx([20, 20, 20])
    assert [wait_ms(readings) for readings in told] == [None, None, None]


def test_what_comes_after_a_stall_counts() -> None:
    """From when those who were sent in it have their first tokens."""
    scene = stalled()
    scene.first("long", 3100)
    scene.send("later", 3150)
    scene.first("behind", 3250)
    scene.to("talks", 3250, 57)
    scene.read(3300)
    for name, tokens in (("talks", 64), ("behind", 8)):
        scene.to(name, 3950, tokens)
    scene.first("later", 3950)
    readings = scene.read(4200)
    assert gap_ms(readings) == pytest.approx(100)
    assert wait_ms(readings) == pytest.approx(800, abs=1)


def test_a_stall_is_known_for_half_as_long_again_as_predicted() -> None:
    """An engine that takes longer has another trouble."""
    scene = stalled()
    assert scene.read(4050)[1:3] == (pytest.approx(20 * MS), None)
    scene.to("talks", 4200, 57)
    readings = scene.read(4200)
    assert gap_ms(readings) is None
    assert wait_ms(readings) == pytest.approx(2700, abs=1)
    scene.to("talks", 5200, 58)
    assert gap_ms(scene.read(5200)) == pytest.approx(1000)


def test_a_long_prompt_that_nothing_paces_explains_nothing() -> None:
    """There may be no end of them."""
    scene = stalled(paced=False)
    assert gap_ms(scene.read(2200)) == pytest.approx((1100 + 1100) / 56)
    assert wait_ms(scene.read(3000)) == pytest.approx(1500, abs=1)


def test_a_long_prompt_may_be_given_up_or_not_streamed() -> None:
    """What it stopped is explained all the same."""
    scene = stalled(streaming=False)
    assert wait_ms(scene.read(2000)) is None
    scene.ends("long", 2600)
    scene.first("behind", 2600)
    scene.to("talks", 2600, 57)
    assert scene.read(3000)[1:3] == (pytest.approx(20 * MS), None)


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────


def test_broken_promises_of_streams_under_way() -> None:
    """By a first token that is late, or from twenty tokens on by a pace that is too slow."""
    scene = Scene()
    scene.send("late", 100)
    scene.send("slow", 200)
    scene.first("slow", 300)
    scene.to("slow", 1000, 11)  # 70 ms, of too few tokens
    scene.send("p1", 300, P1)
    assert scene.read(1100).overdue == [[], [], []]
    scene.to("slow", 1700, 21)
    assert scene.read(1701).overdue == [[100 * MS, 200 * MS], [], []]
    scene.to("slow", 1710, 41)
    assert scene.read(3301).overdue == [[100 * MS], [300 * MS], []]


def test_the_fullest_memory_counts() -> None:
    """As far as engines tell."""
    scene = Scene()
    assert scene.read(1000).kv_usage is None
    scene.slots.told(EngineLoad(kv_usage=0.4), 1000 * MS)
    fuller = UpstreamSlots(upstream("b"), SchedulingParameters())
    fuller.told(EngineLoad(kv_usage=0.7), 1000 * MS)
    assert scene.signals.measure([scene.slots, fuller], PROMISES, 2000 * MS).kv_usage == 0.7
    assert scene.read(9000).kv_usage is None


def test_demand_is_what_was_asked_for_in_fifteen_seconds() -> None:
    """With what has turned out to cost less; never below nothing."""
    scene = Scene()
    scene.signals.asked(P0, 10_000)
    for second in range(1, 16):
        demand = scene.read(second * 1000).demand
    assert demand[P0] == 10_000 // 15
    scene.signals.asked(P0, -2_500)
    assert scene.read(16_000).demand[P0] == 0
    scene.signals.asked(P0, 30_000)
    assert scene.read(17_000).demand[P0] == 27_500 // 15


def test_who_was_held_back_is_told_once() -> None:
    """Each reading tells of the time since the one before."""
    scene = Scene()
    scene.signals.held_back(P1)
    assert scene.read(1000).held_back == (False, True, False)
    assert scene.read(2000).held_back == (False, False, False)


def test_verdicts_are_kept_for_five_minutes() -> None:
    """And no longer."""
    scene = Scene()
    for second in (1, 200):
        scene.signals.judged(P0, Verdict(0, nanoseconds(second), True))
    assert len(scene.read(301_000).verdicts[P0]) == 2
    assert len(scene.read(302_000).verdicts[P0]) == 1
    assert len(scene.read(501_000).verdicts[P0]) == 0
