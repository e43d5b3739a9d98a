"""A part of a configuration laid over the one in force."""

from typing import Any

import pytest

from gateway.api.admin_settings import ChangeRefused, changed_settings, read_change, shown_settings
from gateway.config_reading import ConfigError
from gateway.settings import Settings

TWO_ENGINES = Settings.model_validate(
    {
        "upstreams": [
            {"name": "gpu0", "url": "http://127.0.0.1:1", "api_key": "secret-of-the-engine"},
            {"name": "gpu.1", "url": "http://127.0.0.1:2"},
        ]
    }
)


def test_what_is_not_named_stays() -> None:
    """A change of nothing is no change, of one setting a change of that one."""
    assert changed_settings(TWO_ENGINES, {}) == TWO_ENGINES
    assert changed_settings(TWO_ENGINES, {"classes": {"P0": {}}}) == TWO_ENGINES
    changed = changed_settings(TWO_ENGINES, {"upstreams": {"gpu.1": {"max_in_flight": None}}})
    assert [upstream.max_in_flight for upstream in changed.upstreams] == [128, None]
    assert changed.upstreams[0] == TWO_ENGINES.upstreams[0]
    changed = changed_settings(TWO_ENGINES, {"classes": {"P2": {"slo": {"ttft_seconds": 20}}}})
    assert changed.classes.P2.slo is not None
    assert changed.classes.P2.slo.ttft_seconds == 20
    assert changed.classes.P0 == TWO_ENGINES.classes.P0


def test_what_is_shown_can_be_sent_back() -> None:
    """The settings as they are shown are a change that changes nothing, and hold no secret."""
    shown = shown_settings(TWO_ENGINES)
    assert changed_settings(TWO_ENGINES, shown) == TWO_ENGINES
    assert "secret-of-the-engine" not in repr(shown)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"capacty": {}}, "capacty"),
        ({"mode": "watch"}, "mode"),
        ({"mode": {}}, "mode"),
        ({"classes": {"P0": {"share": 0.9}}}, "classes"),
        ({"classes": {"P3": {"share": 0.1}}}, "classes.P3"),
        ({"classes": {"P0": {"slo": {"ttft_seconds": -1}}}}, "classes.P0.slo.ttft_seconds"),
        ({"controller": {"law": "magic"}}, "controller.law"),
        ({"controller": {"class_floor": {"P2": 0.06}}}, "controller.class_floor.P2"),
        ({"upstreams": []}, "upstreams"),
        ({"upstreams": {"gpu9": {"max_in_flight": 1}}}, "upstreams.gpu9"),
        ({"upstreams": {"gpu.1": {"max_in_flight": -1}}}, "upstreams.gpu.1.max_in_flight"),
        ({"upstreams": {"gpu0": {"url": "http://elsewhere"}}}, "upstreams.gpu0.url"),
        ({"upstreams": {"gpu0": {"api_key": "mine"}}}, "upstreams.gpu0.api_key"),
        ({"server": {"operations_token": None}}, "server.operations_token"),
        ({"keys_file": "/etc/passwd"}, "keys_file"),
        ({"decision_log": "/tmp/x"}, "decision_log"),
        ({"logging": {"format": "json"}}, "logging.format"),
    ],
)
def test_a_wrong_change_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    """What the check of a file refuses, and what only a file may say; the message begins with the name."""
    with pytest.raises(ChangeRefused) as refused:
        changed_settings(TWO_ENGINES, change)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ")


def test_a_change_is_checked_as_a_file_is() -> None:
    """The words are the same."""
    with pytest.raises(ConfigError) as refused:
        changed_settings(TWO_ENGINES, {"capacity": {"burst_seconds": 0, "min_burst_tokns": 1}})
    assert refused.value.problems == (
        "capacity.burst_seconds: found 0, expected a number of seconds above 0",
        "capacity.min_burst_tokns: unknown key, did you mean min_burst_tokens?",
    )


def test_thousands_of_unknown_names_get_a_short_answer() -> None:
    """The first of them are told, each in the usual words, and that there are more."""
    with pytest.raises(ChangeRefused) as refused:
        changed_settings(TWO_ENGINES, {f"capacity{n}": 1 for n in range(5_000)})
    problems = refused.value.problems
    assert (len(problems), problems[-1]) == (21, "and more is wrong")
    assert problems[1] == "capacity1: unknown key, did you mean capacity?"
    assert refused.value.param == "capacity0"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"mode: observe",
        b"[]",
        b"null",
        b'{"mode": "observe", "mode": "enforce"}',
        b'{"slo": {"target": NaN}}',
        b'{"capacity": {"tokens_per_second": 1e400}}',
        b'{"capacity": {"tokens_per_second": 1' + b"0" * 5000 + b"}}",
        b'{"\\ud800": 1}',
        b'{"x": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ],
)
def test_what_is_no_mapping_in_json_is_refused(body: bytes) -> None:
    """Also a name given twice and numbers that JSON, or nobody, has."""
    with pytest.raises(ChangeRefused):
        read_change(body)
