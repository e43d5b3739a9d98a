"""The arithmetic of `make bench-fleet`: what it says of a run is what happened in it."""

from collections.abc import Sequence

import pytest

from gateway.policy.request import PRIORITIES, Priority
from tests.benchmarks.fleet.figures import Observed
from tests.benchmarks.fleet.load import Arrival, Asked, arrivals
from tests.support.fleet_processes import Admitted

P0, P1, P2 = PRIORITIES
CAPACITY = 100.0
SECONDS = 40.0


def observed(admitted: Sequence[Admitted] = (), asked: Sequence[Asked] = ()) -> Observed:
    in_order = sorted(admitted, key=lambda one: one.at)
    return Observed(CAPACITY, SECONDS, in_order, in_order, asked, 0.0)


def steadily(priority: Priority, tokens_per_second: int, begin: int = 0, end: int = 40) -> list[Admitted]:
    """One request each second."""
    return [Admitted(at + 0.5, priority, tokens_per_second, at) for at in range(begin, end)]


def test_what_was_admitted_is_told_in_parts_of_the_budget() -> None:
    """By class, from the tenth second on; what came before does not count."""
    run = observed([*steadily(P0, 60), *steadily(P1, 30, 5), *steadily(P2, 500, 0, 10)])
    assert run.by_class() == pytest.approx([0.6, 0.3, 0.0])


def test_the_fullest_window_is_found_wherever_it_begins() -> None:
    """Ten seconds at C, and in their midst two seconds at twice C: 12 seconds' worth in the fullest ten."""
    run = observed([*steadily(P0, 100), *steadily(P1, 100, 23, 25)])
    assert run.fullest() == pytest.approx(1.2)
    assert run.fullest(window=1.0) == pytest.approx(2.0)


def test_a_class_that_gets_nothing_for_ten_seconds_is_seen() -> None:
    """However much it gets in the rest."""
    rest = [*steadily(P0, 60), *steadily(P1, 35)]
    assert observed([*rest, *steadily(P2, 5)]).least_of_share() == pytest.approx(1.0)
    assert observed([*rest, *steadily(P2, 50, 0, 20), *steadily(P2, 50, 30)]).least_of_share() == 0.0


def ended(number: int, status: int | None, first_byte_seconds: float | None = None) -> Asked:
    return Asked(Arrival(15.0, number, 0, P0, 10), status, first_byte_seconds)


def test_refused_and_late_requests_have_missed_their_first_token() -> None:
    """One of four came in time."""
    asked = [ended(0, 200, 0.3), ended(1, 200, 2.5), ended(2, 429), ended(3, None)]
    run = observed(asked=asked)
    assert run.attainment() == 0.25
    assert run.failed == 1


def test_a_request_that_the_engine_had_and_no_client_is_lost() -> None:
    """And one that it had twice, but not one whose client was cut off by the end of the run."""
    waits = ended(3, None)
    waits.given_up = True
    asked = [ended(0, 200, 0.1), ended(1, 503), ended(2, 200, 0.1), waits]
    run = observed([Admitted(15.1, P0, 10, number) for number in (0, 1, 2, 2, 3)], asked)
    assert run.lost == 2


def test_the_load_is_the_same_for_any_number_of_gateways() -> None:
    """At the same times the same requests; and as much as was asked for."""
    one, three = arrivals(24_000, 30, 1, weights=(1.0,)), arrivals(24_000, 30, 1)
    assert [(a.at, a.number, a.priority, a.cost) for a in one] == [
        (a.at, a.number, a.priority, a.cost) for a in three
    ]
    assert sum(a.cost for a in one) == pytest.approx(2 * 24_000 * 30, rel=0.1)
    assert sum(a.replica == 0 for a in three) == pytest.approx(0.8 * len(three), rel=0.05)
