"""The engine on virtual time: what it notes down lazily is what token by token would have shown."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.mock_backend.gpu_model import PRESETS
from gateway.policy.request import Priority
from gateway.simulator.engine import LargestSince
from gateway.simulator.experiment import Experiment, Run
from gateway.simulator.workload import CHAT_LENGTHS, Caller, PoissonStream, Workload
from tests.simulator.test_experiment import DEFAULTS

SMALL = replace(PRESETS["a100_llama3_8b"], kv_tokens=16_000)
"""So little memory that sequences lose theirs and begin again."""
BUSY = Workload(open=tuple(PoissonStream(Caller(p, "t"), 2.0, CHAT_LENGTHS) for p in Priority))


def run(watch: "dict[int, list[int]] | None" = None, gateway: bool = False) -> Run:
    told = None if watch is None else lambda request, now: watch[request.number].append(now)
    return Experiment(BUSY, DEFAULTS, {"gpu0": SMALL}, seed=3, seconds=20, gateway=gateway, watch=told).run()


def test_times_and_gaps_are_those_of_the_single_tokens() -> None:
    """Also of sequences that had to begin again."""
    seen: dict[int, list[int]] = defaultdict(list)
    records = run(seen).records
    paused = 0
    for record in records:
        times = seen[int(record.request_id)]
        assert record.usage is not None
        assert len(times) == record.usage.output_tokens
        assert record.ttft_ns == times[0] - record.arrived_at
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert record.max_gap_ns == max(gaps, default=None)
        if gaps:
            assert record.tpot_ns == sum(gaps) // len(gaps)
        paused += max(gaps, default=0) > 5 * 10**8
    assert paused > 0


def test_watching_changes_nothing() -> None:
    for gateway in (False, True):
        assert run(defaultdict(list), gateway).records == run(None, gateway).records


@given(st.lists(st.integers(0, 6), max_size=30))
def test_the_largest_since_a_place(values: list[int]) -> None:
    largest = LargestSince()
    for place, value in enumerate(values):
        largest.add(place, value)
        start = Random(place).randrange(place + 1)
        assert largest.ask(start) == max(values[start : place + 1])
    assert largest.ask(len(values)) is None
