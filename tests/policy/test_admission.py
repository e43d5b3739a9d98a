"""The façade: what it records of a request, what it learns from endings, and how it groups upstreams."""

from collections.abc import Callable

import pytest

from gateway.policy.admission import NOTHING_DELIVERED, Admission, Delivered
from gateway.policy.clock import NEVER, ManualClock, to_nanoseconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.regrouping import connected
from gateway.policy.request import Priority, Stage, Usage
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import P0, P1, P2, ask, nanoseconds, policy, upstream

WIDE = upstream(max_in_flight=None)


def one_request(
    *,
    waited: float = 0,
    first: float | None = None,
    last: float | None = None,
    ended: float = 10,
    usage: Usage | None = None,
    outcome: Outcome = Outcome.COMPLETED,
    **given: object,
) -> RequestEnded:
    """The record of a request that waited so long, and got its tokens at these times from its arrival."""
    driver = VirtualDriver(policy())
    driver.submit("holder", P1)
    driver.submit("r", P1, 100, **given)
    end = nanoseconds(ended)
    driver.at(nanoseconds(waited), lambda: driver.finish("holder"))
    if first is not None:
        driver.at(nanoseconds(first), lambda: driver.first_token("r"))
    delivered = Delivered(usage, None if last is None else nanoseconds(last), nanoseconds(0.3))
    driver.at(end, lambda: driver.finish("r", outcome=outcome, delivered=delivered))
    driver.run(ended)
    return driver.endings.records[-1]


def test_times_of_a_streamed_request() -> None:
    """First token from arrival and from dispatch, pace between tokens, wait and end, all of one clock."""
    record = one_request(waited=3, first=3.5, last=7.5, ended=8, usage=Usage(100, 41), tenant="x")
    assert record.queue_wait_ns == nanoseconds(3)
    assert record.ttft_ns == nanoseconds(3.5)
    assert record.upstream_ttft_ns == nanoseconds(0.5)
    assert record.tpot_ns == nanoseconds(0.1)
    assert record.max_gap_ns == nanoseconds(0.3)
    assert (record.arrived_at, record.ended_at) == (0, nanoseconds(8))
    assert (record.upstream, record.tenant, record.model) == ("gpu0", "x", "m")
    assert record.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("output", "sequences", "tpot"),
    [(0, 1, None), (1, 1, None), (2, 1, 4.0), (5, 1, 1.0), (10, 2, 1.0), (2, 2, None)],
)
def test_pace_needs_two_tokens(output: int, sequences: int, tpot: float | None) -> None:
    """(last − first) / (tokens of one sequence − 1); absent, never infinite, for one token or none."""
    record = one_request(first=1, last=5, usage=Usage(100, output), sequences=sequences)
    assert record.tpot_ns == (None if tpot is None else nanoseconds(tpot))


def test_what_did_not_happen_is_absent() -> None:
    """Without a first token there is no time to it; without usage no pace."""
    record = one_request(usage=None, outcome=Outcome.UPSTREAM_REFUSED)
    assert (record.ttft_ns, record.upstream_ttft_ns, record.tpot_ns, record.usage) == (None, None, None, None)
    assert record.charged == 0


def test_the_first_first_token_counts() -> None:
    """A second first token changes nothing."""
    driver = VirtualDriver(policy(WIDE))
    driver.submit("r", P0)
    for at in (1, 2):
        driver.at(nanoseconds(at), lambda: driver.first_token("r"))
    driver.at(nanoseconds(3), lambda: driver.finish("r"))
    driver.run(3)
    assert driver.endings.records[0].ttft_ns == nanoseconds(1)


def test_a_refused_request_has_a_record_too() -> None:
    """One that was never dispatched has neither upstream nor wait, and was charged nothing."""
    driver = VirtualDriver(policy(wait=1))
    driver.submit("holder", P0)
    driver.submit("r", P2, 100)
    driver.run(1)
    record = driver.endings.records[0]
    assert (record.request_id, record.outcome) == ("r", Outcome.QUEUE_TIMEOUT)
    assert (record.upstream, record.queue_wait_ns, record.charged) == (None, None, 0)
    assert record.estimated_cost == 100_000


def reserved(*endings: Callable[[VirtualDriver, str], None]) -> int:
    """What is set aside for an answer after twenty requests that ended so."""
    driver = VirtualDriver(policy(WIDE, capacity={"initial_output_tokens": 77}))
    for i in range(20):
        driver.submit(f"{i}", P1)
        endings[0](driver, f"{i}")
    return driver.submit("probe", P1).output_reserve


def test_lengths_of_complete_answers_are_learned() -> None:
    """The reserve follows the answers that were completed, not those that broke off."""
    assert reserved(lambda d, name: d.finish(name, 1, output=9)) == 9
    assert reserved(lambda d, name: d.finish(name, 1, output=9, outcome=Outcome.CLIENT_GONE_STREAMING)) == 77
    assert reserved(lambda d, name: d.finish(name, -1)) == 77


def test_lengths_are_learned_per_class_and_sequence() -> None:
    """Another class's answers teach nothing, and n answers of a request count as one length."""
    driver = VirtualDriver(policy(WIDE, capacity={"initial_output_tokens": 77}))
    for i in range(20):
        driver.submit(f"{i}", P1, sequences=4)
        driver.finish(f"{i}", 1, output=40)
    assert driver.submit("same", P1, sequences=2).output_reserve == 20
    assert driver.submit("other", P2).output_reserve == 77


def test_charge_is_weighted_and_settled() -> None:
    """The charge is the class's weight times the formula, and what stays is what was used."""
    driver = VirtualDriver(
        policy(
            WIDE, classes={P1: {"weight": 2.0}}, capacity={"output_weight": 4.0, "initial_output_tokens": 10}
        )
    )
    assert driver.submit("r", P1, 100).charged == 2 * (100 + 40) * 1000
    driver.finish("r", delivered=Delivered(Usage(100, 5, cached_tokens=50)))
    assert driver.endings.records[0].charged == 2 * (100 - 45 + 20) * 1000
    assert driver.endings.records[0].estimated_cost == 280_000


def test_first_tokens_teach_the_upstream_its_prefill() -> None:
    """The time to the first token of a prompt that had the engine alone is learned; of others it is not."""
    driver = VirtualDriver(policy(WIDE))
    for i in range(5):
        driver.at(nanoseconds(i * 10), lambda i=i: driver.submit(f"{i}", P1, 1000))  # type: ignore[misc]
        driver.at(nanoseconds(i * 10 + 2), lambda i=i: driver.first_token(f"{i}"))  # type: ignore[misc]
    driver.run(100)
    model = driver.admission.upstream("gpu0").prefill
    assert model.predict_ns(1000) == pytest.approx(nanoseconds(2))
    driver.submit("large", P0, 30_000)
    driver.submit("behind it", P0, 10)
    driver.at(nanoseconds(160), lambda: driver.first_token("behind it"))
    driver.run(160)
    assert model.samples == 5


def test_the_policy_says_when_it_must_be_woken() -> None:
    """With nobody waiting nothing is due; what is due lies always ahead."""
    driver = VirtualDriver(policy(wait=5))
    assert driver.admission.next_deadline() == NEVER
    driver.submit("a", P0)
    assert driver.admission.next_deadline() == NEVER
    driver.submit("b", P0)
    assert driver.admission.next_deadline() == nanoseconds(5)
    driver.run(6)
    assert driver.admission.next_deadline() == NEVER


def test_finishing_or_starting_one_that_waits_does_nothing() -> None:
    """Calls that belong to a dispatched request leave a waiting or an ended one alone."""
    driver = VirtualDriver(policy(wait=5))
    driver.submit("a", P0)
    waiting = driver.submit("b", P0)
    driver.admission.finish(waiting, Outcome.COMPLETED, NOTHING_DELIVERED)
    driver.admission.first_token(waiting)
    assert waiting.outcome is None
    assert waiting.first_token_at is None
    driver.run(6)
    assert waiting.outcome is Outcome.QUEUE_TIMEOUT
    driver.admission.finish(waiting, Outcome.COMPLETED, NOTHING_DELIVERED)
    driver.admission.cancel(waiting)
    assert waiting.outcome is Outcome.QUEUE_TIMEOUT
    assert len(driver.endings.records) == 1


@pytest.mark.parametrize(
    ("models", "groups"),
    [
        ([("a",), ("b",), ("c",)], [[0], [1], [2]]),
        ([("a",), ("b",), ("a", "b")], [[0, 1, 2]]),
        ([("a", "b"), ("c",), ("b", "d"), ("d",)], [[1], [0, 2, 3]]),
        ([("a",), ("*",), ("c",)], [[0, 1, 2]]),
        ([("a",), ("a",)], [[0, 1]]),
    ],
)
def test_upstreams_that_share_a_model_are_one_group(
    models: list[tuple[str, ...]], groups: list[list[int]]
) -> None:
    """Sharing is passed on: whoever shares with one shares with its whole group."""
    upstreams = [upstream(str(i), models=m) for i, m in enumerate(models)]
    told = sorted(sorted(int(u.name) for u in group) for group in connected(upstreams))
    assert told == sorted(groups)


def test_the_clock_does_not_go_back() -> None:
    """A manual clock refuses to go back, and seconds become nanoseconds never too early."""
    clock = ManualClock(5)
    clock.advance_to(5)
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance_to(4)
    assert to_nanoseconds(1e-10) == 1
    assert to_nanoseconds(0.1 + 0.2) == 300_000_001
    assert clock.advance(1.5) == 1_500_000_005


def test_class_names_are_public_numbers_are_not() -> None:
    """A class prints under its name, and the smaller goes first."""
    assert [p.name for p in sorted(Priority)] == ["P0", "P1", "P2"]


@pytest.mark.parametrize(
    ("sequences", "prompts", "tokens"), [(1, 1, 100), (3, 1, 300), (5, 5, 100), (10, 5, 200)]
)
def test_each_answer_holds_its_prompt_in_memory(sequences: int, prompts: int, tokens: int) -> None:
    """The input of a list of prompts is counted once, and once more for every further answer to it."""
    driver = VirtualDriver(policy(WIDE))
    driver.submit("r", P1, 100, sequences=sequences, prompts=prompts)
    assert driver.tickets["r"].total_tokens == tokens


def test_what_comes_due_between_two_looks_at_the_clock_is_not_forgotten() -> None:
    """The time to be woken at reckons from the last advance: an instant passed since is due at once."""
    clock = ManualClock()
    scheduling = {"long_prompt_tokens": 50, "long_prompt_duty": 0.5}
    admission = Admission(
        policy(upstream(max_in_flight=None, tokens_per_second=1000), scheduling=scheduling), clock
    )
    admission.submit(ask("p0", P0))
    first = admission.submit(ask("long 1", P2, 100))
    admission.finish(first, Outcome.COMPLETED)
    waiting = admission.submit(ask("long 2", P2, 100))
    turn = admission.pools[0].slots[0].next_long_at
    clock.advance_to(turn - 1)
    admission.advance()
    clock.advance_to(turn + 1)
    assert admission.next_deadline() <= turn + 2
    clock.advance_to(turn + 2)
    admission.advance()
    assert waiting.stage is Stage.DISPATCHED
