"""A decision log can be read back, and what was decided follows from what was told."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.policy.events import RatesChanged
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters, TenantParameters
from gateway.policy.request import PRIORITIES
from gateway.simulator.decision_log import LoggedRun, Reconfigured, read_decision_log, with_older
from gateway.telemetry.decision_log import DecisionLog, DecisionLogFile
from tests.support.decision_replay import offered, replayed
from tests.support.drivers import assert_quiet
from tests.support.logged_traffic import LoggedTraffic
from tests.support.policy_settings import P0, P1, P2, policy, upstream

CLASSES = {
    p: {
        "holdback": {P0: 1.0, P1: 0.9, P2: 0.6}[p],
        "ceiling_share": {P0: 1.0, P1: 1.0, P2: 0.5}[p],
        "wait": {P0: 1, P1: 4, P2: 9}[p],
        "throttle": {P0: 0.5, P1: 3, P2: 9}[p],
        "max_queued_requests": 6,
        "max_queued_bytes": 900,
        "ttft": {P0: 0.5, P1: 2, P2: None}[p],
        "tpot": {P0: 0.05, P1: None, P2: None}[p],
    }
    for p in PRIORITIES
}
EVERYTHING = replace(
    policy(
        upstream("a", models=("m",), max_in_flight=4, tokens_per_second=600, accepts="short"),
        upstream("b", models=("m",), max_in_flight=3, max_in_flight_tokens=700, tokens_per_second=400),
        upstream("other", models=("x",), max_in_flight=2, tokens_per_second=500),
        classes=CLASSES,
        capacity={
            "burst_seconds": 0.5,
            "min_burst_tokens": 200,
            "max_debt_seconds": 2.0,
            "initial_output_tokens": 5,
            "output_weight": 2.0,
        },
        scheduling={
            "skip_limit": {P1: 2, P2: 4},
            "long_prompt_tokens": 120,
            "max_pending_prefill_tokens": 100,
            "long_prompt_duty": 0.3,
            "deadline_drop": True,
        },
        no_upstream_seconds=2,
    ),
    tenants={"u": TenantParameters(20_000, 120), "v": TenantParameters(None, 200)},
    key_max_in_flight={"key-1": 3},
)
"""Every kind of limit, tight enough to bind."""


def observing(parameters: PolicyParameters) -> PolicyParameters:
    """The same, with P1 in observe mode."""
    classes = {**parameters.classes, P1: replace(parameters.classes[P1], observe=True)}
    return replace(parameters, classes=classes)


def busy_minute(seed: int, parameters: PolicyParameters = EVERYTHING, grain_ns: int = 1) -> LoggedTraffic:
    traffic = LoggedTraffic(parameters, seed, models="mmmx", grain_ns=grain_ns)
    traffic.book(requests=600, seconds=60)
    return traffic


def written(lines: list[str], folder: Path) -> LoggedRun:
    path = folder / "decisions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (run,) = read_decision_log(path)
    return run


def assert_replays(run: LoggedRun) -> None:
    """All that the log says of each request comes out again, also what it saw at its arrival."""
    logged, again = offered(run), replayed(run)
    for one, other in zip(logged, again, strict=False):
        assert one._replace(order=None) == other._replace(order=None)
    assert len(again) == len(logged)


# ── replay ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("seed", "grain_ns"), [(4, 1), (1, 1), (2, 50_000_000), (3, 50_000_000)])
def test_a_replay_decides_the_same(seed: int, grain_ns: int, tmp_path: Path) -> None:
    """Who goes when and where, who is told no, what each is charged: all of it, to the nanosecond, and also
    where much happens at one instant."""
    traffic = busy_minute(seed, grain_ns=grain_ns)
    traffic.run(100)
    assert_quiet(traffic)
    run = written(traffic.lines, tmp_path)
    assert offered(run) == run.requests
    assert len(run.requests) == 600
    assert Counter(r.outcome for r in run.requests).keys() >= {
        Outcome.COMPLETED,
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.UPSTREAM_REFUSED,
        Outcome.CLIENT_GONE_QUEUED,
        Outcome.CLIENT_GONE_STREAMING,
    }
    assert any(r.requeued_at for r in run.requests)
    assert any(r.promoted for r in run.requests)
    assert any(r.by_tenant_limit for r in run.requests)
    assert_replays(run)


def test_a_replay_decides_the_same_where_a_class_is_only_observed(tmp_path: Path) -> None:
    """What would have been refused is found again."""
    traffic = busy_minute(7, observing(EVERYTHING))
    traffic.run(100)
    run = written(traffic.lines, tmp_path)
    assert any(r.would_be for r in run.requests)
    assert_replays(run)


def test_a_shutdown_is_replayed(tmp_path: Path) -> None:
    """Those that waited, and those that came later, are refused again; the rest goes on."""
    traffic = busy_minute(8)
    traffic.at(40 * 10**9 + 1, traffic.drain)
    traffic.run(100)
    run = written(traffic.lines, tmp_path)
    assert sum(r.outcome is Outcome.REJECTED_DRAINING for r in run.requests) > 100
    assert_replays(run)


def test_other_settings_are_taken_where_they_were(tmp_path: Path) -> None:
    """A log that a reload went into is replayed with both."""
    traffic = busy_minute(9)
    wider = replace(EVERYTHING, key_max_in_flight={}, tenants={"u": TenantParameters(5_000, 60)})
    traffic.at(30 * 10**9 + 1, partial(traffic.reload, wider))
    traffic.run(100)
    run = written(traffic.lines, tmp_path)
    assert [e for e in run.events if isinstance(e, Reconfigured)] == [Reconfigured(wider, 30 * 10**9 + 1)]
    assert_replays(run)


def test_other_upstreams_are_taken_where_they_were(tmp_path: Path) -> None:
    """Those who waited for one that has left are refused again, or go to the same place at the same time."""
    traffic = busy_minute(5)
    a, b, other = EVERYTHING.upstreams
    moved = replace(a, address="elsewhere", models=("m", "x"))
    reloads = {
        10: (a, b, replace(other, name="new", max_in_flight=1), other),
        20: (a, b),
        30: (moved, replace(b, models=("x",))),
        40: (replace(other, models=("*",)), b),
        50: (a, b, other),
    }
    for second, upstreams in reloads.items():
        traffic.at(second * 10**9 + 1, partial(traffic.reload, replace(EVERYTHING, upstreams=upstreams)))
    traffic.run(100)
    assert_quiet(traffic)
    run = written(traffic.lines, tmp_path)
    assert [e.at for e in run.events if isinstance(e, Reconfigured)] == [s * 10**9 + 1 for s in reloads]
    assert any(
        r.outcome is Outcome.REJECTED_NO_UPSTREAM and r.ended_at == 20 * 10**9 + 1 for r in run.requests
    )
    assert {r.upstream for r in run.requests} >= {"a", "b", "other", "new"}
    assert_replays(run)


def test_a_replay_can_fail(tmp_path: Path) -> None:
    """With other settings than the log was written under it decides something else."""
    traffic = busy_minute(0)
    traffic.run(100)
    run = written(traffic.lines, tmp_path)
    run.parameters = replace(EVERYTHING, no_upstream_ns=10**9, key_max_in_flight={})
    with pytest.raises((AssertionError, ValueError)):
        assert_replays(run)


def test_the_files_of_a_log_are_read_as_one(tmp_path: Path) -> None:
    """From the oldest to the newest; the configuration at the top of each changes nothing."""
    traffic = busy_minute(1)
    traffic.run(100)
    path = tmp_path / "log"
    log = DecisionLogFile(path, max_bytes=40_000, files=100, configuration=traffic.configuration)
    for line in traffic.lines[1:]:
        log._write(line)
    log.close()
    assert len(with_older(path)) > 10
    (run,) = read_decision_log(*with_older(path))
    assert run.events == written(traffic.lines, tmp_path).events
    assert_replays(run)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def traffic() -> LoggedTraffic:
    """Some hundred lines."""
    traffic = LoggedTraffic(EVERYTHING, 5, models="mmmx")
    traffic.book(requests=50, seconds=10)
    traffic.run(30)
    return traffic


def test_records_come_back_as_they_were(traffic: LoggedTraffic, tmp_path: Path) -> None:
    """The reader's records are the policy's own."""
    change = RatesChanged(7, "severity", "gap", "down", (3, 2, 1), (3, 2, 0), {"gap": 1.5})
    DecisionLog(traffic.lines.append).rates_changed(change)
    run = written(traffic.lines, tmp_path)
    assert run.requests == traffic.endings.records
    assert run.requests[0].ask == traffic.tickets[run.requests[0].request_id].ask
    assert run.parameters == EVERYTHING
    assert run.events[-1] == change
    assert (run.version, run.began_at, run.wall_time_ns) == ("0", 0, 10**18)


def test_each_start_of_a_gateway_is_a_run(traffic: LoggedTraffic, tmp_path: Path) -> None:
    """A log goes on below what a former process wrote, which may have left half a line."""
    other = LoggedTraffic(EVERYTHING, 6)
    path = tmp_path / "log"
    path.write_text("\n".join([*traffic.lines, '{"event":"req', *other.lines, '{"ts":']), encoding="utf-8")
    first, second = read_decision_log(path)
    assert len(first.requests) == 50
    assert second.requests == []
    assert first.run != second.run


def test_lost_and_unknown_lines(traffic: LoggedTraffic, tmp_path: Path) -> None:
    """What the log says it lacks is counted; kinds of line from a later version are passed over."""
    lines = [*traffic.lines, '{"level":"warning","event":"log lines dropped","count":4}', '{"event":"news"}']
    run = written(lines, tmp_path)
    assert run.lost_lines == 4
    assert run.events == written(traffic.lines, tmp_path).events


@pytest.mark.parametrize(
    ("number", "line", "says"),
    [
        (1, '{"event":"health","upstream":"a","healthy":true,"at_ns":1}', "no configuration"),
        (2, '{"event":"health","upstream":"a","healthy":true}', "at_ns"),
        (2, '{"event":"request"', "no JSON"),
        (2, '{"ts":"now"}', "event"),
        (2, "[]", "list"),
    ],
)
def test_nonsense_is_named(traffic: LoggedTraffic, tmp_path: Path, number: int, line: str, says: str) -> None:
    """By its file and line."""
    lines = traffic.lines[:5]
    lines.insert(number - 1, line)
    with pytest.raises(ValueError, match=rf"decisions\.jsonl, line {number}: .*{says}"):
        written(lines, tmp_path)


def test_the_log_holds_nothing_but_json_objects(traffic: LoggedTraffic) -> None:
    """One a line, each with its time and its kind."""
    for line in traffic.lines:
        assert "\n" not in line
        assert {"ts", "event"} <= json.loads(line).keys()
