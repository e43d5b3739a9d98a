"""What a control law made of gaps and waits is in the log itself, so that a replay decides the same."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.policy.events import RatesChanged
from gateway.policy.parameters import ControlParameters, PolicyParameters
from gateway.policy.request import PRIORITIES
from gateway.simulator.decision_log import LoggedRun, read_decision_log
from tests.support.decision_replay import offered, replayed
from tests.support.drivers import assert_quiet
from tests.support.logged_traffic import LoggedTraffic
from tests.support.policy_settings import P0, P1, P2, policy, upstream


def settings(law: str) -> PolicyParameters:
    """Two budgets, tight ones, and promises that are often broken."""
    made = policy(
        upstream("a", models=("m",), max_in_flight=4, tokens_per_second=600),
        upstream("b", models=("m",), max_in_flight=3, tokens_per_second=400),
        upstream("other", models=("x",), max_in_flight=2, tokens_per_second=500),
        classes={
            p: {
                "floor": {P0: 0.3, P1: 0.1, P2: 0.01}[p],
                "wait": 4,
                "throttle": 2,
                "ttft": {P0: 0.3, P1: 2, P2: None}[p],
                "tpot": {P0: 0.05, P1: None, P2: None}[p],
            }
            for p in PRIORITIES
        },
        capacity={"burst_seconds": 0.5, "min_burst_tokens": 200, "output_weight": 2.0},
        no_upstream_seconds=2,
    )
    return replace(made, law=law, control=ControlParameters(min_samples=5))


def logged(traffic: LoggedTraffic, folder: Path) -> LoggedRun:
    path = folder / "decisions.jsonl"
    path.write_text("\n".join(traffic.lines) + "\n", encoding="utf-8")
    (run,) = read_decision_log(path)
    return run


def changes(run: LoggedRun) -> list[RatesChanged]:
    return [event for event in run.events if isinstance(event, RatesChanged)]


def assert_replays(run: LoggedRun) -> None:
    for one, other in zip(offered(run), again := replayed(run), strict=False):
        assert one._replace(order=None) == other._replace(order=None)
    assert len(again) == len(offered(run))


@pytest.mark.parametrize("law", ["severity", "compliance"])
@pytest.mark.parametrize("grain_ns", [1, 50_000_000])
def test_a_replay_decides_the_same(law: str, grain_ns: int, tmp_path: Path) -> None:
    """Also where requests come and go at the very instants of a law's ticks, and engines with them."""
    traffic = LoggedTraffic(settings(law), 3, models="mmmx", grain_ns=grain_ns)
    traffic.book(requests=900, seconds=90)
    traffic.run(200)
    assert_quiet(traffic)
    run = logged(traffic, tmp_path)
    told = changes(run)
    assert {c.upstreams for c in told} == {("a", "b"), ("other",)}
    assert {c.direction for c in told} >= {"up", "down"}
    assert any(c.reason == "capacity" for c in told)
    assert_replays(run)


def test_a_reload_between_two_laws_is_replayed(tmp_path: Path) -> None:
    """Each begins at the shares."""
    traffic = LoggedTraffic(settings("severity"), 4, models="mmmx")
    traffic.book(requests=900, seconds=90)
    for second, law in ((30, "compliance"), (60, "static"), (75, "severity")):
        traffic.at(second * 10**9 + 1, partial(traffic.reload, settings(law)))
    traffic.run(200)
    assert_replays(logged(traffic, tmp_path))


def test_without_the_changes_a_replay_decides_otherwise(tmp_path: Path) -> None:
    """They are what makes it exact."""
    traffic = LoggedTraffic(settings("severity"), 3, models="mmmx")
    traffic.book(requests=900, seconds=90)
    traffic.run(200)
    run = logged(traffic, tmp_path)
    run.events = [event for event in run.events if not isinstance(event, RatesChanged)]
    with pytest.raises((AssertionError, ValueError)):
        assert_replays(run)
