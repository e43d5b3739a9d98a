"""A fleet of real policies in virtual time against one gateway with the same load."""

import os

import pytest

from gateway.policy.request import Priority
from gateway.simulator.fleet_simulation import HALF, OVERLOAD, Scenario, one_gateway, simulate, uneven

pytestmark = pytest.mark.skipif(not os.environ.get("FLEET_CHECK"), reason="make fleet-check tries it")

JOINED_NS = 300_000_000
CAPACITY = 60_000
"""About 50 requests a second."""


def test_three_replicas_let_through_what_one_does() -> None:
    """At twice C, by 80 to 15 to 5: C within 5 % in every ten seconds, class shares within 2 points, and the
    same chance at the fullest replica as at all; by ten to fifteen calls a second each, and a few more."""
    scenario = Scenario(3, OVERLOAD, uneven(3), capacity=CAPACITY, seconds=25)
    result = simulate(scenario)
    alone = one_gateway(OVERLOAD, scenario.capacity, scenario.seconds, seed=1)
    assert result.overshoot(10) < 0.05
    assert result.used() > 0.97
    assert result.by_class() == pytest.approx([0.6, 0.35, 0.05], abs=0.02)
    assert result.by_class() == pytest.approx(alone.by_class(), abs=0.02)
    all_of_p1 = result.served(lambda a: a.priority is Priority.P1)
    fullest = result.served(lambda a: a.priority is Priority.P1 and a.replica == 0)
    assert fullest == pytest.approx(all_of_p1, abs=0.05)
    assert 8 < result.outcomes.calls / 3 / 25 < 20


def test_half_a_load_is_served_wherever_it_comes() -> None:
    """Once all have joined nobody is refused, at the emptiest replica or the fullest, where C / n refuses."""
    scenario = Scenario(3, HALF, uneven(3), seconds=15)
    assert not [a for a, _ in simulate(scenario).outcomes.refused if a.at > JOINED_NS]
    divided = simulate(Scenario(3, HALF, uneven(3), seconds=15, divided=True))
    assert [a for a, _ in divided.outcomes.refused if a.at > JOINED_NS]


def test_a_flood_at_one_replica_does_not_reach_the_tenants_of_another() -> None:
    """One tenant asks for twice C at the first replica; the others' at the second get what they ask."""
    result = simulate(
        Scenario(2, (0.3, 0.2, 0.0), (0.5, 0.5), capacity=CAPACITY, seconds=20, flood=2.0), seed=2
    )
    assert result.overshoot(10) < 0.05
    assert result.served(lambda a: a.replica == 1) > 0.97
    assert result.served(lambda a: a.replica == 0 and a.tenant != "flood") > 0.97


def test_the_same_seed_has_the_same_outcome() -> None:
    """To the last request."""
    scenario = Scenario(2, OVERLOAD, (0.7, 0.3), capacity=CAPACITY, seconds=4)
    assert simulate(scenario).outcomes.paid == simulate(scenario).outcomes.paid
