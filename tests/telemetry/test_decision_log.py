import dataclasses
import json
import os
import re
import stat
from pathlib import Path

import pytest
import structlog

from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Order, RatesChanged, RequestEnded, Seen, SeenUpstream
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ask, Priority
from gateway.telemetry.decision_log import Configuration, DecisionLog, DecisionLogFile, plain_parameters
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.log_setup import Stamp

SEEN = Seen(
    bucket_tokens=(7200.0, 4199.5, -3.0),
    rates_tokens_per_second=(7200.0, 4200.0, 600.0),
    throttled=(0, 1, 2),
    ready=(3, 0, 0),
    upstreams=(SeenUpstream("gpu0", True, (1, 2, 3), 9000, 512, 2.0, None),),
)
ASK = Ask(
    "req-1",
    Priority.P0,
    "team-a",
    "llama",
    800,
    max_output_tokens=200,
    sequences=2,
    body_bytes=3300,
    client_timeout_ns=5 * 10**9,
    key="key-1",
    fairness_id="sub",
    claimed=Priority.P2,
)
LOAD = EngineLoad(running=4, waiting=0, kv_usage=0.25, kv_tokens=100_000)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def log(lines) -> DecisionLog:
    return DecisionLog(lines.append, Stamp(lambda: 1_700_000_000_123_000_000))


@pytest.fixture
def open_log(tmp_path, parameters, clock):
    """Opens the file `log`; closes what is open at the end."""
    opened = []

    def open_log(max_bytes=10**6, files=5, path=tmp_path / "log") -> DecisionLogFile:
        configuration = Configuration(parameters, clock, "1.2.3")
        opened.append(DecisionLogFile(path, max_bytes=max_bytes, files=files, configuration=configuration))
        return opened[-1]

    yield open_log
    for log in opened:
        log.close()


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_tells_all_of_a_request(log, lines, ended):
    """What it was, what the policy saw, what it decided, what came of it; units are in the names."""
    log.ended(ended(ask=ASK, seen=SEEN, would_be=Outcome.REJECTED_RATE, order=Order(5, None, 6, 9)))
    (line,) = map(json.loads, lines)
    assert line == {
        "ts": "2023-11-14T22:13:20.123Z",
        "event": "request",
        "request_id": "req-1",
        "priority": "P0",
        "tenant": "team-a",
        "model": "llama",
        "outcome": "completed",
        "streaming": True,
        "upstream": "gpu0",
        "arrived_at_ns": 0,
        "ended_at_ns": 6_500_000_000,
        "queue_wait_ns": 3_000_000_000,
        "ttft_ns": 3_500_000_000,
        "upstream_ttft_ns": 500_000_000,
        "tpot_ns": 25_000_000,
        "max_gap_ns": 70_000_000,
        "usage": {"input_tokens": 800, "output_tokens": 120, "cached_tokens": 300},
        "estimated_cost_millitokens": 1_500_000,
        "charged_millitokens": 1_280_000,
        "promoted": False,
        "by_tenant_limit": False,
        "would_be": "rejected_rate",
        "requeued_at_ns": None,
        "not_reached": None,
        "ask": {
            "input_tokens": 800,
            "max_output_tokens": 200,
            "sequences": 2,
            "prompts": 1,
            "body_bytes": 3300,
            "client_timeout_ns": 5_000_000_000,
            "key": "key-1",
            "fairness_id": "sub",
            "claimed": "P2",
        },
        "seen": {
            "bucket_tokens": [7200.0, 4199.5, -3.0],
            "rates_tokens_per_second": [7200.0, 4200.0, 600.0],
            "throttled_requests": [0, 1, 2],
            "ready_requests": [3, 0, 0],
            "upstreams": [
                {
                    "name": "gpu0",
                    "healthy": True,
                    "in_flight_requests": [1, 2, 3],
                    "in_flight_tokens": 9000,
                    "pending_prefill_tokens": 512,
                    "waiting_requests": 2.0,
                    "kv_usage": None,
                }
            ],
        },
        "order": {"arrived": 5, "requeued": None, "first_token": 6, "ended": 9},
    }


def test_a_request_refused_at_the_door_has_its_line(log, lines):
    """With the same fields, though nothing is known of what it asked for."""
    log.ended(ended_at_the_door("r1", Outcome.UNAUTHORIZED, 5, 2_000_005))
    (line,) = map(json.loads, lines)
    assert (line["outcome"], line["priority"]) == ("unauthorized", "P1")
    assert (line["arrived_at_ns"], line["ended_at_ns"]) == (5, 2_000_005)
    assert line["ask"] is line["seen"] is line["usage"] is None


def test_names_from_outside_are_made_harmless(log, lines, ended):
    """As in the request log: no odd characters, and no more than a name's length."""
    odd = "a\n\x1b[31m<b>" + "x" * 200
    log.ended(
        ended(
            request_id=odd,
            tenant=odd,
            model=odd,
            ask=ASK._replace(key="k\n", fairness_id=odd),
        )
    )
    (line,) = map(json.loads, lines)
    assert line["tenant"] == line["model"] == line["ask"]["fairness_id"] == "a__" + "_31m_b_" + "x" * 90
    assert line["request_id"] == "a__" + "_31m_b_" + "x" * 118
    assert line["ask"]["key"] == "k_"
    assert lines[0].isascii()


def test_what_else_changed_has_lines_of_its_own(log, lines):
    """Rates with their reason, health, each reading of an engine's page, an engine without room."""
    change = RatesChanged(7, "severity", "gap", "down", (3, 2, 1), (3, 2, 0), {"gap": 1.5}, ("gpu0",), 4)
    log.rates_changed(change)
    log.health_changed("gpu0", False, 8)
    log.trial_allowed("gpu0", 8)
    log.load_told("gpu0", LOAD, 9)
    log.load_told("gpu0", LOAD, 10)
    log.queue_full("gpu0", 11)
    told = [json.loads(line) for line in lines]
    assert all(line.pop("ts") for line in told)
    load = {"running_requests": 4, "waiting_requests": 0, "kv_usage": 0.25, "kv_tokens": 100_000}
    assert told == [
        {
            "event": "rates",
            "at_ns": 7,
            "law": "severity",
            "reason": "gap",
            "direction": "down",
            "old_rates_millitokens_per_second": [3, 2, 1],
            "new_rates_millitokens_per_second": [3, 2, 0],
            "inputs": {"gap": 1.5},
            "upstreams": ["gpu0"],
            "order": 4,
            "applied": True,
        },
        {"event": "health", "at_ns": 8, "upstream": "gpu0", "healthy": False},
        {"event": "trial", "at_ns": 8, "upstream": "gpu0"},
        {"event": "load", "at_ns": 9, "upstream": "gpu0", **load},
        {"event": "load", "at_ns": 10, "upstream": "gpu0", **load},
        {"event": "queue_full", "at_ns": 11, "upstream": "gpu0"},
    ]


def test_numbers_of_any_size_are_written(log, lines, ended):
    """Settings allow weights that take a cost beyond 64 bits."""
    log.ended(ended(charged=2**80))
    assert json.loads(lines[0])["charged_millitokens"] == 2**80


def test_details_are_wanted(log):
    """The policy fills in what was asked and seen for this listener."""
    assert log.wants_details


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_begins_with_the_configuration(open_log, tmp_path, parameters, clock):
    """The version, both clocks, and the settings by name: the file can be read alone."""
    clock.advance(1)
    log = open_log()
    log.close()
    (line,) = events(tmp_path / "log")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["ts"])
    assert (line["event"], line["version"]) == ("configuration", "1.2.3")
    assert line["at_ns"] == line["since_ns"] == clock.now()
    assert line["wall_time_ns"] > 1.6e18
    assert line["parameters"] == json.loads(json.dumps(plain_parameters(parameters)))
    assert line["parameters"]["classes"]["P0"]["slo"]["ttft_ns"] == 10**9
    assert line["parameters"]["scheduling"]["skip_limit"] == {"P1": 2, "P2": 19}


def test_other_settings_have_a_line_when_they_come(open_log, tmp_path, parameters, clock, ended):
    """Within the same run, with the time since when they hold; the files after it begin with them."""
    log = open_log(max_bytes=6300)
    clock.advance(5)
    log.reconfigured(dataclasses.replace(parameters, law="other"), clock.now())
    for _ in range(10):
        log.ended(ended())
    log.close()
    first, second = (e for e in events(tmp_path / "log.1") if e["event"] == "configuration")
    assert (first["parameters"]["law"], second["parameters"]["law"]) == ("static", "other")
    assert (second["run"], second["since_ns"]) == (first["run"], first["since_ns"] + 5 * 10**9)
    heading = events(tmp_path / "log")[0]
    assert (heading["parameters"], heading["since_ns"]) == (second["parameters"], second["since_ns"])


def test_full_files_are_put_aside(open_log, tmp_path, ended):
    """Each begins with the configuration, none is much too large, and no line is lost or there twice."""
    log = open_log(max_bytes=10_000, files=100)
    for number in range(300):
        log.ended(ended(request_id=f"r{number}", ask=ASK, seen=SEEN))
    log.close()
    paths = [*sorted(tmp_path.glob("log.*"), key=lambda path: -int(path.suffix[1:])), tmp_path / "log"]
    assert len(paths) > 20
    assert all(events(path)[0]["event"] == "configuration" for path in paths)
    assert all(path.stat().st_size <= 10_000 for path in paths)
    told = [e["request_id"] for path in paths for e in events(path) if e["event"] == "request"]
    assert told == [f"r{number}" for number in range(300)]
    assert len({events(path)[0]["run"] for path in paths}) == 1


@pytest.mark.parametrize("files", [1, 2, 3])
def test_only_so_many_files_are_kept(open_log, tmp_path, ended, files):
    """The oldest go; the newest line is in the file without a number."""
    log = open_log(max_bytes=5000, files=files)
    for number in range(100):
        log.ended(ended(request_id=f"r{number}"))
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2"][:files]
    assert events(tmp_path / "log")[-1]["request_id"] == "r99"
    assert all(path.stat().st_size <= 5000 for path in tmp_path.iterdir())


def test_a_file_smaller_than_a_line_holds_one(open_log, tmp_path, ended):
    """However small the files are set, every line is written."""
    log = open_log(max_bytes=1, files=4)
    for number in range(9):
        log.ended(ended(request_id=f"r{number}"))
    log.close()
    told = [[e["event"] for e in events(path)] for path in tmp_path.iterdir()]
    assert told == [["configuration", "request"]] * 4


def test_only_its_owner_reads_it(open_log, tmp_path, ended):
    """It names tenants; so do the files put aside."""
    log = open_log(max_bytes=4000)
    for _ in range(20):
        log.ended(ended())
    log.close()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


def test_a_restarted_gateway_goes_on_below_what_is_there(open_log, tmp_path, ended):
    """With its own configuration, below a line that the one before left unfinished; a full file is put
    aside first."""
    (tmp_path / "log").write_text('{"event":"request","request_', encoding="utf-8")
    log = open_log(max_bytes=5000)
    log.ended(ended())
    log.close()
    cut, *whole = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert cut == '{"event":"request","request_'
    assert [json.loads(line)["event"] for line in whole] == ["configuration", "request"]
    with (tmp_path / "log").open("a", encoding="utf-8") as file:
        file.write("x" * 5000 + "\n")
    open_log(max_bytes=5000).close()
    assert [event["event"] for event in events(tmp_path / "log")] == ["configuration"]
    assert (tmp_path / "log.1").stat().st_size > 5000


def test_a_folder_that_goes_costs_lines_and_no_more(open_log, tmp_path, ended):
    """One warning; when it is back the file says how many lines it lacks, and goes on."""
    folder = tmp_path / "logs"
    folder.mkdir()
    log = open_log(max_bytes=4000, path=folder / "log")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with structlog.testing.capture_logs() as warnings:
        for _ in range(3):
            for _ in range(20):
                log.ended(ended())
            log._output.flush()
    assert [w["event"] for w in warnings] == ["the file cannot be written"]
    assert warnings[0]["file"] == str(folder / "log")
    folder.mkdir()
    with structlog.testing.capture_logs() as news:
        log.ended(ended(request_id="after"))
        log.close()
    assert [n["event"] for n in news] == ["the file is written again"]
    heading, dropped, last = events(folder / "log")
    assert (heading["event"], last["request_id"]) == ("configuration", "after")
    assert (dropped["event"], dropped["count"]) == ("log lines dropped", 60)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
def test_a_full_disk_at_the_start_is_told(open_log):
    """As is any file that cannot be opened."""
    with pytest.raises(OSError, match="No space left"):
        open_log(path=Path("/dev/full"))
    with pytest.raises(FileNotFoundError):
        open_log(path=Path("/absent/log"))


def test_a_device_is_never_put_aside(open_log, ended):
    """A log that goes to /dev/null or to standard output stays there."""
    log = open_log(max_bytes=100, path=Path("/dev/null"))
    for _ in range(20):
        log.ended(ended())
    log.close()
    assert not os.path.exists("/dev/null.1")


def test_every_field_of_the_records_is_there(log, lines, ended):
    """A fact that is added to a record later does not go missing here."""
    log.ended(ended(ask=ASK, seen=SEEN))
    line = json.loads(lines[0])
    units = r"_(ns|millitokens|requests)$"

    def names(of: dict) -> set[str]:
        return {re.sub(units, "", name) for name in of}

    def fields(of: type) -> set[str]:
        return {re.sub(units, "", name) for name in of._fields}

    assert names(line) - {"ts", "event"} == fields(RequestEnded)
    assert names(line["ask"]) | names(line) >= fields(Ask)
    assert names(line["seen"]) == fields(Seen)
    assert names(line["seen"]["upstreams"][0]) == fields(SeenUpstream)
