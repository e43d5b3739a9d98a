import io
import json
import logging
import re
from collections.abc import Callable

import pytest
import structlog

from gateway.policy.outcome import Outcome
from gateway.policy.request import Priority, Usage
from gateway.telemetry.endings import ended_at_the_door
from gateway.telemetry.log_setup import Stamp, configure_logging, render_json
from gateway.telemetry.request_log import RequestLog

pytestmark = pytest.mark.usefixtures("own_logging")

SECRET = "sk-Zx81TopSecretValue42"


class Log:
    """Logging to a string."""

    def __init__(self, level="info", format="json"):
        self.stream = io.StringIO()
        self.output = configure_logging(level, format, self.stream)
        self.requests = RequestLog(lambda outcome: 200 if outcome is Outcome.COMPLETED else 503)

    def text(self) -> str:
        self.output.flush()
        return self.stream.getvalue()

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def make_log() -> Callable[..., Log]:
    logs = []

    def make(*args, **kwargs) -> Log:
        logs.append(Log(*args, **kwargs))
        return logs[-1]

    yield make
    for log in logs:
        log.output.close()


def test_a_line_tells_all_of_a_request(make_log, ended):
    """Every field by name, times in milliseconds, cost in tokens."""
    log = make_log()
    log.requests.ended(ended(promoted=True))
    (line,) = log.lines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "req-1",
        "tenant": "team-a",
        "model": "llama",
        "priority": "P0",
        "outcome": "completed",
        "status": 200,
        "streaming": True,
        "upstream": "gpu0",
        "queue_ms": 3000.0,
        "ttft_ms": 3500.0,
        "tpot_ms": 25.0,
        "max_gap_ms": 70.0,
        "duration_ms": 6500.0,
        "input_tokens": 800,
        "cached_tokens": 300,
        "output_tokens": 120,
        "cost": 1280.0,
        "promoted": True,
    }


def test_what_does_not_apply_is_null(make_log):
    """A request that ended at the door has the same fields, most of them null."""
    log = make_log()
    log.requests.ended(ended_at_the_door("r1", Outcome.UNAUTHORIZED, 0, 2_000_000))
    (line,) = log.lines()
    absent = {
        "tenant",
        "model",
        "upstream",
        "queue_ms",
        "ttft_ms",
        "tpot_ms",
        "input_tokens",
        "output_tokens",
    }
    assert all(line[name] is None for name in absent)
    assert (line["priority"], line["duration_ms"], line["cost"]) == ("P1", 2.0, 0.0)


def test_status_is_the_one_that_was_sent(make_log, ended):
    """The edge's word counts, once; else the usual status of the outcome."""
    log = make_log()
    log.requests.answered("req-1", 201)
    log.requests.ended(ended())
    log.requests.ended(ended())
    log.requests.write(ended(outcome=Outcome.UPSTREAM_ERROR), 418)
    log.requests.ended(ended(outcome=Outcome.QUEUE_TIMEOUT))
    assert [line["status"] for line in log.lines()] == [201, 200, 418, 503]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", {"info", "warning", "error"}),
        ("info", {"info", "warning", "error"}),
        ("warning", {"warning", "error"}),
        ("error", {"error"}),
    ],
)
def test_level_filters(make_log, ended, level, written):
    """Ordinary endings are `info`, the engine's failures `warning`, our own `error`."""
    log = make_log(level)
    for outcome in (
        Outcome.COMPLETED,
        Outcome.REJECTED_RATE,
        Outcome.UPSTREAM_TIMEOUT,
        Outcome.INTERNAL_ERROR,
    ):
        log.requests.ended(ended(outcome=outcome))
    assert {line["level"] for line in log.lines()} == written


def test_another_level_is_taken_when_told(make_log, ended):
    """A reload may change it while the gateway runs."""
    log = make_log("error")
    log.requests.ended(ended())
    assert log.lines() == []
    configure_logging("info", "json", log.stream)
    log.requests.take_logging()
    log.requests.ended(ended())
    assert [line["event"] for line in log.lines()] == ["request"]


def test_every_outcome_and_class_can_be_logged(make_log, ended):
    """Each outcome has a line of its own name."""
    log = make_log()
    for outcome in Outcome:
        log.requests.ended(ended(outcome=outcome, priority=Priority.P2, usage=Usage(1, 0)))
    assert [line["outcome"] for line in log.lines()] == [o.value for o in Outcome]


def test_names_from_outside_cannot_forge_a_line(make_log, ended):
    """One request is one line of valid JSON, whatever its names are made of; on a console too."""
    for format in ("json", "console"):
        log = make_log(format=format)
        log.requests.ended(
            ended(request_id='a\nb"' + "\x1b[31m" + "c" * 500, model="\ud800\r\n", tenant="t\x00")
        )
        assert len(log.text().splitlines()) == 1
        assert "\x1b" not in log.text()
    assert len(make_log().lines()) == 0


def test_console_is_for_people(make_log, ended):
    """On a console a line is text without the fields that do not apply."""
    log = make_log(format="console")
    log.requests.ended(ended(tpot_ns=None))
    text = log.text()
    assert "request_id=req-1" in text
    assert "tpot_ms" not in text
    assert not text.startswith("{")


def test_auto_is_json_where_nobody_looks(make_log, ended):
    """A stream that is no terminal gets JSON."""
    log = make_log(format="auto")
    log.requests.ended(ended())
    assert log.lines()[0]["event"] == "request"


def test_standard_loggers_go_the_same_way(make_log):
    """The server's and other libraries' records are lines like ours; its access log is off."""
    log = make_log()
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 12)
    logging.getLogger("uvicorn.access").info("GET /v1/models?key=x")
    logging.getLogger("httpx").info("HTTP Request: GET http://gpu0")
    logging.getLogger("somebody").debug("too quiet")
    (line,) = log.lines()
    assert (line["event"], line["level"]) == ("Started server process [12]", "info")
    assert line["logger"] == "uvicorn.error"


def test_configuring_again_takes_the_place_of_the_earlier(make_log):
    """One line per record after a second call, in the new output."""
    first, second = make_log(), make_log()
    logging.getLogger("somebody").warning("once")
    structlog.get_logger().warning("twice")
    assert first.lines() == []
    assert [line["event"] for line in second.lines()] == ["once", "twice"]


@pytest.mark.parametrize("format", ["json", "console"])
def test_keys_never_appear(make_log, format):
    """Keys in messages, exceptions, tracebacks, fields and URLs are hidden, at any level."""
    log = make_log("debug", format)
    ours, theirs = structlog.get_logger(), logging.getLogger("somebody")
    key = "a-key-of-no-special-form"
    ours.info(f"bad header Authorization: Bearer {key}")
    ours.info("call", authorization=key, api_key=key, cookie=key)
    ours.warning("failed", error=ValueError(f"cannot send (b'x-api-key', b'{key}')"))
    theirs.warning("GET https://gpu0/v1/models?api_key=%s&token=%s", key, key)
    theirs.debug("found %s in the file", SECRET)
    try:
        local = key  # noqa: F841 (a traceback must not show it)
        raise RuntimeError(f"api_key={key} was refused; {SECRET}")
    except RuntimeError:
        ours.exception("internal error")
        theirs.exception("internal error")
    text = log.text()
    assert key not in text
    assert SECRET not in text
    assert text.count("RuntimeError") >= 2
    assert "***" in text


def test_exceptions_are_one_json_line(make_log):
    """A traceback is a field of its line."""
    log = make_log()
    try:
        raise KeyError("x")
    except KeyError:
        structlog.get_logger().exception("boom", upstream="gpu0")
    (line,) = log.lines()
    assert (line["level"], line["event"], line["upstream"]) == ("error", "boom", "gpu0")
    assert "KeyError: 'x'" in line["exception"]


def test_numbers_and_text_that_json_lacks():
    """NaN becomes null; a text that cannot be encoded is escaped; both lines parse."""
    assert json.loads(render_json(None, "info", {"x": float("nan")})) == {"x": None}
    assert json.loads(render_json(None, "info", {"x": "\ud800"})) == {"x": "\ud800"}


def test_stamp_is_universal_time_in_milliseconds():
    """The second is written out once, and anew when it changes."""
    times = iter([0, 999_999_999, 1_700_000_000_042_000_000])
    stamp = Stamp(lambda: next(times))
    found = [stamp(None, "warn", {"event": "e"})["ts"] for _ in range(3)]
    assert found == ["1970-01-01T00:00:00.000Z", "1970-01-01T00:00:00.999Z", "2023-11-14T22:13:20.042Z"]
