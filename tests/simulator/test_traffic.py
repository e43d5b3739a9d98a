"""Traffic: who asks, in which class, and when, from a rate, a trace or a decision log."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import PRIORITIES, Ask, Priority
from gateway.simulator.decision_log import read_decision_log
from gateway.simulator.experiment import Experiment
from gateway.simulator.traffic import (
    ClassesBy,
    Crowd,
    LoggedRequest,
    LogReplay,
    Mix,
    OpenTraffic,
    Synthetic,
    TraceReplay,
    Traffic,
    class_of_tenant,
    is_coarse,
    logged_requests,
)
from gateway.simulator.workload import Arrival, FixedLengths, Lengths, TraceRow, generator
from tests.simulator.test_experiment import DEFAULTS, SEED_32K
from tests.support.logged_traffic import LoggedTraffic

P0, P1, P2 = Priority
SECOND = NANOSECONDS_PER_SECOND
ONE = FixedLengths(Lengths(10, 2))
THIRDS = Mix((1 / 3, 1 / 3, 1 / 3))


def arrivals(traffic: OpenTraffic, seed: int = 1, most: int = 100_000) -> list[Arrival]:
    stream = traffic.stream(seed, "m")
    return list(islice(stream.arrivals(generator(seed, "open", 0)), most))


def classes(traffic: OpenTraffic, seed: int = 1) -> list[Priority]:
    return [arrival.caller.priority for arrival in arrivals(traffic, seed) if arrival.caller is not None]


# ---------------------------------------------------------------------- mix


def test_a_mix_is_read_in_any_unit() -> None:
    assert Mix.parse("30/45/25").parts == pytest.approx((0.30, 0.45, 0.25))
    assert Mix.parse("1/1/0").parts == (0.5, 0.5, 0)


@pytest.mark.parametrize("text", ["", "30/45", "1/2/3/4", "a/b/c", "-1/1/1", "0/0/0", "nan/1/1", "inf/1/1"])
def test_a_mix_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="30/45/25"):
        Mix.parse(text)


def test_clients_are_split_without_losing_one() -> None:
    """The largest remainders are rounded up."""
    assert Mix.parse("30/45/25").split(10) == [3, 5, 2]
    assert Mix.parse("1/1/1").split(2) == [1, 1, 0]
    for number in range(30):
        assert sum(THIRDS.split(number)) == number


# ---------------------------------------------------------------------- from a rate


def test_a_rate_is_kept_and_classes_are_drawn() -> None:
    """At the mean rate, in the parts of the mix, for the model that is asked for."""
    traffic = Synthetic(20.0, 1.0, ONE, Mix.parse("30/45/25"), seconds=1)
    came = arrivals(traffic, most=20_000)
    assert came[-1].at / SECOND == pytest.approx(1000, rel=0.03)
    parts = Counter(arrival.caller.priority for arrival in came if arrival.caller is not None)
    assert [parts[p] / len(came) for p in PRIORITIES] == pytest.approx([0.30, 0.45, 0.25], abs=0.02)
    assert {arrival.caller.model for arrival in came if arrival.caller is not None} == {"m"}


def test_another_mix_changes_nothing_but_classes() -> None:
    """So that two mixes can be compared at the same arrivals."""
    one, other = (arrivals(Synthetic(5.0, 2.0, ONE, Mix.parse(m), 1), most=200) for m in ("1/1/1", "8/1/1"))
    assert [(a.at, a.lengths) for a in one] == [(a.at, a.lengths) for a in other]
    assert one != other


def test_the_model_of_a_crowd_is_the_one_asked_for() -> None:
    """A class without clients has no stream."""
    crowd = Crowd(4, 1.0, 2, ONE, Mix.parse("1/0/3"))
    streams = Traffic(10, crowd=crowd).workload(1, "m").closed
    assert [(s.caller.priority, s.caller.model, s.clients, s.retries) for s in streams] == [
        (P0, "m", 1, 2),
        (P2, "m", 3, 2),
    ]


# ---------------------------------------------------------------------- from a trace


def rows(*told: tuple[float, int, str | None, Priority | None]) -> list[TraceRow]:
    return [TraceRow(round(at * SECOND), Lengths(length, 1), t, p) for at, length, t, p in told]


def test_a_trace_is_scaled_in_time() -> None:
    """Twice as fast is half as long; nobody is dropped, whatever their class."""
    trace = TraceReplay(rows((0, 5, "a", P0), (3, 5, "b", P2)), 2.0, THIRDS)
    assert [arrival.at / SECOND for arrival in arrivals(trace)] == [0, 1.5]
    assert trace.seconds == pytest.approx(1.5)
    assert [a.caller.tenant for a in arrivals(trace) if a.caller] == ["a", "b"]


def test_classes_of_the_column_go_before_the_mix() -> None:
    """Rows without one are drawn."""
    trace = TraceReplay(rows((0, 5, None, P2), (1, 5, None, None)), 1.0, Mix((1.0, 0.0, 0.0)))
    assert classes(trace) == [P2, P0]


def test_classes_may_be_drawn_whatever_the_column_says() -> None:
    trace = TraceReplay(rows(*[(n, 5, None, P2) for n in range(300)]), 1.0, THIRDS, ClassesBy.MIX)
    assert min(Counter(classes(trace)).values()) > 70
    assert classes(trace) == classes(trace) != classes(trace, seed=2)


def test_long_prompts_are_batch() -> None:
    """The others are realtime or normal, in the proportion of the mix."""
    trace = TraceReplay(
        rows(*[(n, 9000 if n % 2 else 100, None, None) for n in range(2000)]),
        1.0,
        Mix((0.2, 0.6, 0.2)),
        ClassesBy.LENGTH,
        long_prompt_tokens=8192,
    )
    found = classes(trace)
    assert set(found[1::2]) == {P2}
    assert found[::2].count(P0) == pytest.approx(250, abs=50)
    assert found[::2].count(P1) == pytest.approx(750, abs=50)


def test_tenants_have_one_class_each() -> None:
    """The busiest first, each where most is lacking, so that the parts come close to the mix."""
    tenants = "a" * 50 + "b" * 30 + "c" * 15 + "d" * 5
    told = rows(*[(n, 5, t, None) for n, t in enumerate(tenants)])
    assert class_of_tenant(told, Mix((0.3, 0.5, 0.2))) == {"a": P1, "b": P0, "c": P2, "d": P2}
    trace = TraceReplay(told, 1.0, Mix((0.3, 0.5, 0.2)), ClassesBy.TENANT)
    assert Counter(classes(trace)) == {P1: 50, P0: 30, P2: 20}


@pytest.mark.parametrize("by", [ClassesBy.COLUMN, ClassesBy.TENANT])
def test_what_a_trace_does_not_tell_cannot_be_used(by: ClassesBy) -> None:
    with pytest.raises(ValueError, match="not every row has a"):
        TraceReplay(rows((0, 5, None, None)), 1.0, THIRDS, by)


def test_stamps_in_steps_are_spread() -> None:
    """Somewhere in their step, in order, and elsewhere with another seed; fine stamps stay as they are."""
    coarse = rows(*[(3 * (n // 10), 5, None, P1) for n in range(100)])
    trace = TraceReplay(coarse, 1.0, THIRDS)
    at = [arrival.at for arrival in arrivals(trace)]
    assert at == sorted(at)
    assert len(set(at)) == 100
    assert [time // (3 * SECOND) for time in at] == [row.at // (3 * SECOND) for row in coarse]
    assert at != [arrival.at for arrival in arrivals(trace, seed=2)]
    fine = rows((0, 5, None, P1), (0.05, 5, None, P1))
    assert (is_coarse(coarse), is_coarse(fine)) == (True, False)
    assert [a.at for a in arrivals(TraceReplay(fine, 1.0, THIRDS))] == [row.at for row in fine]


# ---------------------------------------------------------------------- from a decision log


def ask(number: int, priority: Priority = P1, limit: int | None = None, sequences: int = 1) -> Ask:
    return Ask(str(number), priority, "t", "m", 70, limit, sequences=sequences)


def test_a_log_asks_what_it_recorded(tmp_path: Path) -> None:
    """Each request that came to the policy, at its time, with all that the policy was told, and as long."""
    traffic = LoggedTraffic(DEFAULTS, 3)
    traffic.book(requests=50, seconds=10)
    traffic.run(60)
    path = tmp_path / "decisions.jsonl"
    path.write_text("\n".join(traffic.lines), encoding="utf-8")
    (run,) = read_decision_log(path)
    log = LogReplay(logged_requests([run]), scale=2.0)
    logged = sorted(run.requests, key=lambda request: request.arrived_at)
    came = arrivals(log)
    assert len(came) == 50
    first = logged[0].arrived_at
    assert [arrival.at for arrival in came] == [round((r.arrived_at - first) / 2) for r in logged]
    told = [arrival.caller.ask for arrival in came if arrival.caller]
    for one, record in zip(told, logged, strict=True):
        assert record.ask is not None
        if record.ask.sequences == 1:
            assert one == record.ask
    for arrival, record in zip(came, logged, strict=True):
        if record.usage is not None and record.usage.output_tokens and arrival.lengths.output_tokens:
            assert arrival.lengths == (record.usage.input_tokens, record.usage.output_tokens)


def test_answers_that_were_never_given_are_drawn_from_those_of_the_class() -> None:
    """Within what the client allows; the same for the same seed."""
    requests = [LoggedRequest(n, ask(n, P0), 70, 5 + n % 2) for n in range(4)]
    requests += [LoggedRequest(10, ask(10, P1), 70, 900)]
    requests += [LoggedRequest(20 + n, ask(n, P0), 70, None) for n in range(40)]
    requests += [LoggedRequest(70, ask(70, P1, limit=3), 70, None), LoggedRequest(71, ask(71, P2), 70, None)]
    log = LogReplay(requests)
    assert log.without_answer == 42
    lengths = [arrival.lengths.output_tokens for arrival in arrivals(log)]
    assert set(lengths[5:45]) == {5, 6}
    assert lengths[45] == 3
    assert lengths[46] in (5, 6, 900)
    assert arrivals(log) == arrivals(log)


def test_several_sequences_cost_what_they_did() -> None:
    """One request of two answers becomes one with all their tokens, and may be as long."""
    logged = _logged(ask(1, limit=50, sequences=2))
    (request,) = logged
    assert (request.ask.sequences, request.ask.max_output_tokens) == (1, 100)


def _logged(one: Ask) -> list[LoggedRequest]:
    traffic = LoggedTraffic(DEFAULTS, 1)
    traffic.book(requests=1, seconds=1)
    traffic.run(30)
    record = traffic.endings.records[0]._replace(ask=one)

    class Run:
        requests = (record,)
        wall_time_ns = began_at = 0

    return logged_requests([Run()])  # type: ignore[list-item]


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(ValueError, match="no request"):
        logged_requests([])


def test_a_log_runs_under_another_configuration() -> None:
    """What needs no tokens ends with its prefill, and nothing of it is forgotten."""
    requests = [LoggedRequest(n * SECOND, ask(n), 70, 9) for n in range(5)]
    requests += [LoggedRequest(6 * SECOND, ask(6, P2, limit=0)._replace(streaming=False), 70, 0)]
    traffic = Traffic(10, LogReplay(requests))
    presets = {"gpu0": SEED_32K}
    run = Experiment(traffic.workload(1, "x"), DEFAULTS, presets, seed=1, seconds=10).run()
    used = [(r.usage.input_tokens, r.usage.output_tokens) for r in run.records if r.usage is not None]
    assert sorted(used) == [(70, 0), *[(70, 9)] * 5]
