"""Workloads: from a seed, close to the statistics they stand for, and strict about traces."""

from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import Priority
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Arrival,
    Caller,
    EvenStream,
    FixedLengths,
    Lengths,
    PoissonStream,
    QuantileLengths,
    ReplayStream,
    TraceRow,
    generator,
    read_trace,
    recorded_lengths,
    retry_wait_ns,
)

CALLER = Caller(Priority.P0)
ONE = FixedLengths(Lengths(10, 2))


def seconds(nanoseconds: int) -> float:
    return nanoseconds / NANOSECONDS_PER_SECOND


# ---------------------------------------------------------------------- streams


def test_one_seed_asks_the_same_every_time() -> None:
    """Another seed, and another place in the run, asks something else."""
    stream = PoissonStream(CALLER, 2.0, CHAT_LENGTHS)

    def first_requests(seed: int, *place: object) -> list[Arrival]:
        return list(islice(stream.arrivals(generator(seed, *place)), 50))

    assert first_requests(1, "open", 0) == first_requests(1, "open", 0)
    assert first_requests(1, "open", 0) != first_requests(2, "open", 0)
    assert first_requests(1, "open", 0) != first_requests(1, "open", 1)


def test_a_poisson_stream_has_its_rate_and_no_memory() -> None:
    """Gaps have the mean 1/rate and as large a deviation."""
    arrivals = list(islice(PoissonStream(CALLER, 4.0, ONE).arrivals(Random(5)), 8001))
    gaps = [seconds(b.at - a.at) for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert variance**0.5 / mean == pytest.approx(1.0, rel=0.05)


def test_an_even_stream_may_start_late_and_end() -> None:
    stream = EvenStream(CALLER, 0.5, ONE, from_seconds=2.0, requests=3)
    assert [seconds(a.at) for a in stream.arrivals(Random(0))] == [2.0, 2.5, 3.0]


def test_a_replay_can_run_faster() -> None:
    rows = [TraceRow(0, Lengths(1, 2)), TraceRow(3 * NANOSECONDS_PER_SECOND, Lengths(3, 4))]
    arrivals = list(ReplayStream(CALLER, rows, speed=2.0).arrivals(Random(0)))
    assert arrivals == [Arrival(0, Lengths(1, 2)), Arrival(1_500_000_000, Lengths(3, 4))]


# ---------------------------------------------------------------------- lengths


def test_conversations_are_as_long_as_the_trace_they_stand_for() -> None:
    """Within a few percent of its mean, median, P90, P99 and maximum."""
    random = Random(11)
    drawn = [CHAT_LENGTHS.draw(random) for _ in range(40_000)]
    told = {"input_tokens": (1155, 1020, 2735, 4142, 14_050), "output_tokens": (211, 129, 424, 601, 1000)}
    for name, (mean, p50, p90, p99, longest) in told.items():
        values = sorted(getattr(lengths, name) for lengths in drawn)
        at = [values[int(part * len(values))] for part in (0.5, 0.9, 0.99)]
        assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)
        assert at == pytest.approx([p50, p90, p99], rel=0.05)
        assert values[0] >= 1
        assert 0.9 * longest < values[-1] <= longest


def test_lengths_lie_on_straight_lines_between_the_quantiles() -> None:
    table = ((0.0, 10), (0.5, 20), (1.0, 100))
    lengths = QuantileLengths(table, ((0.0, 1), (1.0, 1)))

    class Fixed(Random):
        def __init__(self, *values: float) -> None:
            self._values = iter(values)

        def random(self) -> float:
            return next(self._values)

    drawn = [lengths.draw(Fixed(at, 0.5)).input_tokens for at in (0.0, 0.25, 0.5, 0.75)]
    assert drawn == [10, 15, 20, 60]


def test_recorded_pairs_stay_together() -> None:
    rows = [TraceRow(0, Lengths(n, 10 * n)) for n in range(1, 30)]
    source, random = recorded_lengths(rows), Random(3)
    drawn = [source.draw(random) for _ in range(500)]
    assert all(output == 10 * input for input, output in drawn)
    assert len(set(drawn)) == 29


# ---------------------------------------------------------------------- traces


def trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_trace_is_read_by_column_names(tmp_path: Path) -> None:
    """Other columns do not matter, and rows without tokens are failures that left no trace in the engine."""
    text = "user,output_tokens,arrival_s,input_tokens\na,5,0.0,7\nb,0,0.5,8\nc,6,1.25,9\n"
    rows = read_trace(trace(tmp_path, text))
    assert rows == [TraceRow(0, Lengths(7, 5)), TraceRow(1_250_000_000, Lengths(9, 6))]


def test_a_trace_may_tell_tenants_and_classes(tmp_path: Path) -> None:
    text = "arrival_s,class,tenant,input_tokens,output_tokens\n0,p0,a,7,5\n1,,,7,5\n"
    rows = read_trace(trace(tmp_path, text))
    assert [(row.tenant, row.priority) for row in rows] == [("a", Priority.P0), (None, None)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no column arrival_s, input_tokens, output_tokens"),
        ("arrival_s,input_tokens\n0,1\n", "no column output_tokens; found arrival_s, input_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n1,x,1\n", "line 3"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: no output_tokens"),
        ("arrival_s,input_tokens,output_tokens\ninf,1,1\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3: arrival_s goes back"),
        ("arrival_s,input_tokens,output_tokens\n5,1,0\n4,1,1\n", "line 3: arrival_s goes back from 5 to 4"),
        ("arrival_s,input_tokens,output_tokens\n-1,1,1\n", "line 2: arrival_s is negative"),
        ("arrival_s,input_tokens,output_tokens\n0,-1,1\n", "line 2: negative tokens"),
        ("arrival_s,input_tokens,output_tokens,class\n0,1,1,P3\n", "line 2: class is 'P3'"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """The message says where."""
    with pytest.raises(ValueError, match=told):
        read_trace(trace(tmp_path, text))


# ---------------------------------------------------------------------- coming back


def test_a_refused_client_stays_away_as_long_as_it_was_told() -> None:
    """Up to 40 % longer, never over a minute, and a second if it was told nothing."""
    random = Random(2)

    def waits(advice_seconds: float | None) -> list[float]:
        advice = None if advice_seconds is None else round(advice_seconds * NANOSECONDS_PER_SECOND)
        return [seconds(retry_wait_ns(advice, random)) for _ in range(200)]

    assert 10.0 <= min(waits(10.0)) < 10.5 < 13.5 < max(waits(10.0)) <= 14.0
    assert max(waits(50.0)) == 60.0
    assert set(waits(200.0)) == {60.0}
    assert 1.0 <= min(waits(None)) <= max(waits(None)) <= 1.4
    assert min(waits(0.0)) > 0
