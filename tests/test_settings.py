import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from gateway.config_reading import ConfigError
from gateway.config_values import MOCK_PRESETS
from gateway.settings import Settings, load_settings
from tests.support.certificates import self_signed

CONFIG = Path(__file__).parents[1] / "config"

TWO_ENGINES = "upstreams: [{name: a, url: 'http://a:1'}, {name: %s, url: 'http://b:1'}]"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(text: str, **environ: str) -> Settings:
        path = tmp_path / "gateway.yaml"
        path.write_text(text, encoding="utf-8")
        return load_settings(path, environ)

    return load


@pytest.fixture
def problems(load: Any, tmp_path: Path) -> Any:
    """The lines that a configuration is refused with, without the name of the file before them."""

    def problems(text: str, **environ: str) -> list[str]:
        with pytest.raises(ConfigError) as refusal:
            load(text, **environ)
        lines = str(refusal.value).splitlines()
        assert not any("pydantic" in line.lower() for line in lines)
        return [line.removeprefix(f"{tmp_path / 'gateway.yaml'}: ") for line in lines]

    return problems


# ── defaults ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_reference_file_says_what_the_defaults_are() -> None:
    """A gateway started without a file behaves as one started with config/gateway.yaml."""
    assert load_settings(CONFIG / "gateway.yaml", {}) == Settings()
    assert load_settings(None, {}) == Settings()


def test_the_reference_file_leaves_no_setting_out() -> None:
    """Whoever reads config/gateway.yaml has seen all there is."""
    tree = yaml.safe_load((CONFIG / "gateway.yaml").read_text(encoding="utf-8"))
    assert set(_keys(Settings())) == set(_tree_keys(tree))


def _keys(section: BaseModel, prefix: str = "") -> Iterator[str]:
    for name, value in section:
        yield f"{prefix}{name}"
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, BaseModel):
                yield from _keys(part, f"{prefix}{name}.")


def _tree_keys(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}{name}"
        for part in value if isinstance(value, list) else (value,):
            if isinstance(part, dict) and name not in ("routes", "tokenizers"):
                yield from _tree_keys(part, f"{prefix}{name}.")


def test_the_tour_is_a_valid_configuration() -> None:
    """The README's example starts."""
    settings = load_settings(CONFIG / "tour.yaml", {})
    assert settings.upstreams[0].max_in_flight == 4
    assert settings.classes.P2.max_throttle_seconds == 1


def test_a_file_without_content_means_the_defaults(load: Any) -> None:
    """A file of comments alone is not an error."""
    assert load("# nothing yet\n") == Settings()


def test_the_embedded_gpus_are_those_of_the_model() -> None:
    """`mock://` accepts exactly the presets there are."""
    gpu_model = pytest.importorskip("gateway.mock_backend.gpu_model")
    assert frozenset(gpu_model.PRESETS) == MOCK_PRESETS


# ── inheriting ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_class_inherits_what_is_left_out(load: Any) -> None:
    """One value for one class changes nothing else, in it or in the others."""
    settings = load("classes: {P0: {max_wait_seconds: 3}}")
    assert Settings().classes.P0.model_copy(update={"max_wait_seconds": 3.0}) == settings.classes.P0
    assert settings.classes.P1 == Settings().classes.P1
    assert settings.classes.P2 == Settings().classes.P2


def test_latency_targets_inherit_or_are_given_up(load: Any) -> None:
    """A part of an slo keeps the rest of the class's default; null is no promise."""
    settings = load(
        "classes: {P0: {slo: {ttft_seconds: 0.5}}, P1: {slo: null}, P2: {slo: {ttft_seconds: 60}}}"
    )
    assert settings.classes.P0.slo.ttft_seconds == 0.5
    assert settings.classes.P0.slo.tpot_seconds == 0.06
    assert settings.classes.P1.slo is None
    assert settings.classes.P2.slo.ttft_seconds == 60
    assert settings.classes.P2.slo.tpot_seconds is None


def test_nested_entries_inherit(load: Any) -> None:
    """So do upstreams, their health and load, skip limits and floors."""
    settings = load(
        """
        upstreams: [{name: a, url: "http://a:8000/", health: {fail_after: 1}, load: {kv_high: 0.8}}]
        scheduling: {skip_limit: {P2: 9}}
        controller: {class_floor: {P0: 0.2}}
        """
    )
    (upstream,) = settings.upstreams
    assert upstream.url == "http://a:8000"
    assert (upstream.health.fail_after, upstream.health.interval_seconds) == (1, 2)
    assert (upstream.load.kv_high, upstream.load.path) == (0.8, "/metrics")
    assert (settings.scheduling.skip_limit["P1"], settings.scheduling.skip_limit["P2"]) == (2, 9)
    assert [settings.controller.class_floor[name] for name in ("P0", "P1", "P2")] == [0.2, 0.1, 0.01]


def test_routes_are_replaced_whole(load: Any) -> None:
    """Otherwise a default route could not be taken away."""
    assert load("classification: {routes: {}}").classification.routes == {}


def test_durations_take_fractions(load: Any) -> None:
    """Also where the default is whole, and without an upper bound on bursts."""
    settings = load(
        """
        capacity: {burst_seconds: 1e6, tokens_per_second: 1}
        server: {drain_seconds: 0.25, body_read_seconds: 0.5}
        """
    )
    assert settings.capacity.burst_seconds == 1_000_000
    assert settings.capacity.tokens_per_second == 1
    assert settings.server.drain_seconds == 0.25


def test_null_is_no_limit_and_zero_is_allowed(load: Any) -> None:
    """Limits can be lifted, or shut."""
    settings = load(
        """
        upstreams: [{name: a, url: "mock://seed_32k", max_in_flight: null, max_in_flight_tokens: 0}]
        capacity: {max_request_tokens: null}
        classes: {P1: {max_queued_requests: 0, max_queued_bytes: null}}
        """
    )
    assert settings.upstreams[0].max_in_flight is None
    assert settings.upstreams[0].max_in_flight_tokens == 0
    assert settings.capacity.max_request_tokens is None
    assert settings.classes.P1.max_queued_requests == 0
    assert settings.classes.P1.max_queued_bytes is None


def test_a_class_may_live_on_lent_tokens(load: Any) -> None:
    """A share of 0 needs a floor of 0."""
    text = "classes: {P0: {share: 0.65}, P2: {share: 0}}\ncontroller: {class_floor: {P2: %s}}"
    assert load(text % 0).classes.P2.share == 0


def test_tokenizers_lie_beside_the_configuration(load: Any, tmp_path: Path) -> None:
    """A relative path is meant from the file's folder; models may have a slash in their name."""
    tokenizers = load("tokenizers: {org/model: files/tokenizer.json, other: /etc/tokenizer.json}").tokenizers
    assert tokenizers == {
        "org/model": tmp_path / "files/tokenizer.json",
        "other": Path("/etc/tokenizer.json"),
    }


def test_a_keys_file_lies_beside_the_configuration(load: Any, tmp_path: Path) -> None:
    """A relative path means the configuration's folder, an absolute one itself."""
    assert load("keys_file: keys.yaml").keys_file == tmp_path / "keys.yaml"
    assert load("keys_file: /etc/keys.yaml").keys_file == Path("/etc/keys.yaml")


def test_settings_do_not_change(load: Any) -> None:
    """What was checked stays as it was checked."""
    with pytest.raises(ValidationError):
        Settings().server.port = 1  # type: ignore[misc]


# ── the environment ──────────────────────────────────────────────────────────────────────────────────────


def test_the_environment_wins_over_the_file(load: Any) -> None:
    """Value by value: the rest of the file still counts."""
    settings = load(
        "server: {port: 7000, host: localhost}\nclasses: {P0: {max_wait_seconds: 4, max_queued_requests: 7}}",
        QOS_SERVER__PORT="9000",
        QOS_CLASSES__P0__MAX_WAIT_SECONDS="3",
    )
    assert (settings.server.port, settings.server.host) == (9000, "localhost")
    assert (settings.classes.P0.max_wait_seconds, settings.classes.P0.max_queued_requests) == (3, 7)


def test_the_environment_lies_over_the_defaults_too() -> None:
    """No file is needed."""
    settings = load_settings(None, {"QOS_CLASSES__P0__SLO__TTFT_SECONDS": "0.5"})
    assert settings.classes.P0.slo == Settings().classes.P0.slo.model_copy(update={"ttft_seconds": 0.5})  # type: ignore[union-attr]


def test_the_environment_reads_the_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no mapping is given, the process's own environment counts."""
    monkeypatch.setenv("QOS_SERVER__PORT", "9123")
    assert load_settings(None).server.port == 9123
    assert Settings().server.port == 8000


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        ("QOS_UPSTREAMS", '[{"name": "b", "url": "http://b:1"}]', lambda s: s.upstreams[0].name == "b"),
        ("QOS_UPSTREAMS__0__URL", "http://b:1", lambda s: s.upstreams[0].url == "http://b:1"),
        ("QOS_UPSTREAMS__0__HEALTH__PATH", "/ok", lambda s: s.upstreams[0].health.path == "/ok"),
        ("QOS_UPSTREAMS__0__MAX_IN_FLIGHT", "null", lambda s: s.upstreams[0].max_in_flight is None),
        ("QOS_CLASSES__P1__SLO", "null", lambda s: s.classes.P1.slo is None),
        ("QOS_CLASSIFICATION__HEADER", "[X-A, x-b]", lambda s: s.classification.header == ("x-a", "x-b")),
        ("QOS_CLASSIFICATION__SERVICE_TIER", "false", lambda s: s.classification.service_tier is False),
        ("QOS_CLASSIFICATION__ROUTES", "{/v1/x: P0}", lambda s: s.classification.routes == {"/v1/x": "P0"}),
        ("QOS_CONTROLLER__CAPACITY_BOUNDS", "[0.5, 2]", lambda s: s.controller.capacity_bounds == (0.5, 2)),
        ("QOS_KEYS_FILE", "/etc/keys", lambda s: s.keys_file == Path("/etc/keys")),
        (
            "QOS_SERVER__OPERATIONS_TOKEN",
            "123",
            lambda s: s.server.operations_token.get_secret_value() == "123",
        ),
    ],
)
def test_every_kind_of_value_can_come_from_the_environment(variable: str, text: str, read: Any) -> None:
    """Words, numbers, null, lists, mappings, and entries of lists."""
    assert read(load_settings(None, {variable: text}))


def test_a_list_entry_is_changed_or_added_by_its_number(load: Any) -> None:
    """The other entries of the file stay."""
    settings = load(
        "upstreams: [{name: a, url: 'http://a:1', max_in_flight: 3}]",
        QOS_UPSTREAMS__0__NAME="x",
        QOS_UPSTREAMS__1__NAME="y",
        QOS_UPSTREAMS__1__URL="http://b:1",
    )
    assert [(each.name, each.max_in_flight) for each in settings.upstreams] == [("x", 3), ("y", 128)]


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("QOS_SERVER__PORT", "9000x", 'server.port: found "9000x", expected a whole number from 0 to 65535'),
        ("QOS_SERVER__PROT", "9000", "unknown key, did you mean PORT?"),
        ("QOS_SEVER__PORT", "9000", "unknown key, did you mean SERVER?"),
        ("QOS_MODE__X", "1", "there is no such setting; set the whole of QOS_MODE"),
        ("QOS_UPSTREAMS__X__URL", "1", "there is no such setting; set the whole of QOS_UPSTREAMS"),
        ("QOS_UPSTREAMS__7__URL", "http://a:1", "list entries are counted from 0, without gaps"),
        ("QOS_UPSTREAMS", "[", "not valid YAML"),
        ("QOS_CLASSES", "7", "classes: found 7, expected a mapping of settings"),
    ],
)
def test_a_problem_of_the_environment_names_the_variable(variable: str, text: str, says: str) -> None:
    """The operator learns which variable to look at, and a misspelt one is not ignored."""
    with pytest.raises(ConfigError) as refusal:
        load_settings(None, {variable: text})
    assert str(refusal.value).startswith(f"{variable}: ")
    assert says in str(refusal.value)


def test_what_kubernetes_sets_for_a_service_is_not_taken_for_a_setting() -> None:
    """A service called qos-gateway puts QOS_GATEWAY_… into every container beside it."""
    assert load_settings(None, {"QOS_GATEWAY_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}) == Settings()


def test_a_problem_of_file_and_environment_together_names_both(problems: Any) -> None:
    """Each alone may be right."""
    (line,) = problems("classes: {P2: {share: 0.05}}", QOS_CLASSES__P0__SHARE="0.7")
    assert "gateway.yaml and QOS_CLASSES__P0__SHARE: classes: found P0.share 0.7 + " in line


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server: {port: 65536}", "server.port: found 65536, expected a whole number from 0 to 65535"),
        ("server: {port: -1}", "server.port: found -1, expected a whole number from 0 to 65535"),
        ("server: {port: 80.5}", "server.port: found 80.5, expected"),
        ("server: {port: true}", "server.port: found true, expected"),
        ("server: {prot: 1}", "server.prot: unknown key, did you mean port?"),
        ("sever: {port: 1}", "sever: unknown key, did you mean server?"),
        ("zzz: 1", "zzz: unknown key, expected one of capacity, "),
        ("server: 7", "server: found 7, expected a mapping of settings"),
        ("server: {operations_port: 8000}", "server.operations_port: found 8000, expected another port"),
        ("server: {drain_seconds: -0.1}", "server.drain_seconds: found -0.1, expected a number of seconds"),
        ("server: {drain_seconds: .inf}", "server.drain_seconds: found inf, expected a number of seconds"),
        (
            "server: {body_read_seconds: 0}",
            "server.body_read_seconds: found 0, expected a number of seconds above 0",
        ),
        ("server: {max_body_bytes: null}", "server.max_body_bytes: found null, expected a whole number"),
        ("server: {host: 'a b'}", 'server.host: found "a b", expected a host name'),
        ("upstreams: []", "upstreams: found an empty list, expected at least one upstream"),
        ("upstreams: {a: 1}", "upstreams: found a mapping, expected a list"),
        (TWO_ENGINES % "a", 'upstreams[1].name: found "a", which upstreams[0] has'),
        (TWO_ENGINES % "''", 'upstreams[1].name: found "", expected a name'),
        (TWO_ENGINES % "7", "upstreams[1].name: found 7, expected a name"),
        ("upstreams: [{name: a}]", "upstreams[0].url: found nothing, expected a value"),
        (
            "upstreams: [{name: a, url: 'ftp://a'}]",
            'upstreams[0].url: found "ftp://a", expected http://host:port',
        ),
        ("upstreams: [{name: a, url: 'http://'}]", "upstreams[0].url: "),
        ("upstreams: [{name: a, url: 'http://a:x'}]", "upstreams[0].url: "),
        ("upstreams: [{name: a, url: 'http://a:0'}]", "upstreams[0].url: "),
        ("upstreams: [{name: a, url: 'mock://h100'}]", 'upstreams[0].url: found "mock://h100", expected'),
        (
            "upstreams: [{name: a, url: 'http://a:1', models: []}]",
            "upstreams[0].models: found a list of 0, expected",
        ),
        (
            "upstreams: [{name: a, url: 'http://a:1', health: {path: x}}]",
            'upstreams[0].health.path: found "x"',
        ),
        (
            "upstreams: [{name: a, url: 'http://a:1', acepts: any}]",
            "upstreams[0].acepts: unknown key, did you mean",
        ),
        (
            "upstreams: [{name: a, url: 'http://a:1', accepts: all}]",
            "upstreams[0].accepts: found \"all\", expected 'any'",
        ),
        (
            "upstreams: [{name: a, url: 'http://a:1', tokens_per_second: 0.9}]",
            "upstreams[0].tokens_per_second: found",
        ),
        (
            "capacity: {tokens_per_second: 0.5}",
            "capacity.tokens_per_second: found 0.5, expected a number, 1 or more",
        ),
        (
            "capacity: {cache_weight: 1.1}",
            "capacity.cache_weight: found 1.1, expected a fraction from 0 to 1",
        ),
        (
            "capacity: {tokens_per_second: many}",
            'capacity.tokens_per_second: found "many", expected a number',
        ),
        ("classes: {P0: {share: 1.4}}", "classes.P0.share: found 1.4, expected a fraction from 0 to 1"),
        (
            "classes: {P0: {share: 0.7}}",
            "classes: found P0.share 0.7 + P1.share 0.35 + P2.share 0.05 = 1.1, expected",
        ),
        (
            "classes: {P2: {ceiling_share: 0.04}}",
            "classes.P2.ceiling_share: found 0.04, expected a fraction not below",
        ),
        ("classes: {P3: {share: 0}}", "classes.P3: unknown key, did you mean P"),
        ("classes: {P0: {shar: 0.6}}", "classes.P0.shar: unknown key, did you mean share?"),
        ("classes: {P0: {slo: {ttft: 1}}}", "classes.P0.slo.ttft: unknown key, did you mean ttft_seconds?"),
        ("classes: {P0: {slo: {ttft_seconds: 0}}}", "classes.P0.slo.ttft_seconds: found 0, expected"),
        ("classes: {P0: {weight: 0}}", "classes.P0.weight: found 0, expected a number above 0"),
        ("classes: {P0: null}", "classes.P0: found null, expected a mapping of settings"),
        (
            "controller: {class_floor: {P2: 0.06}}",
            "controller.class_floor.P2: found 0.06, expected a floor not above",
        ),
        (
            "controller: {class_floor: {P0: 0.9, P1: 0.2}}",
            "controller.class_floor: found floors that add up to 1.11",
        ),
        ("controller: {capacity_bounds: [1.5, 3]}", "controller.capacity_bounds: found 1.5 and 3, expected"),
        ("controller: {capacity_bounds: [0.2]}", "controller.capacity_bounds"),
        (
            "controller: {law: fast}",
            "controller.law: found \"fast\", expected 'static', 'compliance' or 'severity'",
        ),
        ("scheduling: {skip_limit: {P0: 2}}", "scheduling.skip_limit.P0: unknown key"),
        (
            "scheduling: {deadline_drop: perhaps}",
            'scheduling.deadline_drop: found "perhaps", expected true or false',
        ),
        (
            "classification: {header: ['x y']}",
            'classification.header[0]: found "x y", expected a header name',
        ),
        ("classification: {routes: {/v1/x: P7}}", 'classification.routes./v1/x: found "P7"'),
        (
            "slo: {tighten_below: 0.995}",
            "slo.tighten_below: found 0.995, expected a fraction not above slo.target",
        ),
        ("paths: [v1]", 'paths[0]: found "v1", expected a path that begins with "/"'),
        ("logging: {level: loud}", 'logging.level: found "loud", expected'),
        ("- a", "found a list of 1, expected a mapping of settings"),
        ("1: a", "found the key 1, expected the name of a setting"),
    ],
)
def test_a_wrong_setting_is_refused_in_words(problems: Any, text: str, says: str) -> None:
    """The key, what was found, what was expected: on one line."""
    lines = problems(text)
    assert len(lines) == 1
    assert lines[0].startswith(says) or says in lines[0]


def test_every_problem_has_its_line(problems: Any) -> None:
    """An operator need not start the gateway once per mistake."""
    lines = problems("server: {port: x, hots: y}\nclasses: {P1: {share: 2}}")
    assert [line.partition(":")[0] for line in lines] == ["server.port", "server.hots", "classes.P1.share"]


def test_a_share_of_zero_needs_a_floor_of_zero(problems: Any) -> None:
    """A floor above the share could never be kept."""
    (line,) = problems("classes: {P0: {share: 0.65}, P2: {share: 0}}")
    assert line.startswith(
        "controller.class_floor.P2: found 0.01, expected a floor not above classes.P2.share"
    )


def test_operations_away_from_loopback_need_a_token(problems: Any, load: Any) -> None:
    """Whoever can reach the operators' port must show something."""
    (line,) = problems("server: {operations_host: 0.0.0.0}")
    assert line.startswith("server.operations_token: found null, while operations_host 0.0.0.0")
    assert load("server: {operations_host: 0.0.0.0, operations_token: secret}")
    for host in ("localhost", "127.0.0.2", "'::1'"):
        assert load(f"server: {{operations_host: {host}}}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://store",
        "rediss://user:password@store:6380/3",
        "redis://[::1]:6379",
        "unix:///run/valkey.sock",
    ],
)
def test_state_may_be_shared(load: Any, url: str) -> None:
    """In any Redis or Valkey, with its address as their own clients have it."""
    settings = load(f"state: '{url}'")
    assert settings.store_url == url
    assert "password" not in repr(settings)
    assert load("").store_url is None


@pytest.mark.parametrize(
    "url",
    [
        "redis",
        "http://store:6379",
        "redis://",
        "redis://store:0",
        "redis://store/zero",
        "redis://s/0?x=1",
        "3",
    ],
)
def test_what_is_no_store_is_refused(problems: Any, url: str) -> None:
    """In words that say what would be one."""
    (line,) = problems(f"state: '{url}'")
    assert line.startswith(
        "state: found a value that is not shown, expected memory, or the address of a Redis"
    )


def test_fleets_are_told_apart_and_leases_outlast_calls(problems: Any) -> None:
    """A name that would break the keys' hash tag, and a lease that a few failed calls would end."""
    (line,) = problems("fleet: {name: 'a}b'}")
    assert line == 'fleet.name: found "a}b", expected a name in printable characters without { and }'
    (line,) = problems("fleet: {slice_seconds: 0.6}")
    assert line.startswith("fleet.slice_seconds: found 0.6, expected at most 0.5")
    (line,) = problems("fleet: {lease_seconds: 1, call_seconds_max: 0.5}")
    assert line.startswith("fleet.lease_seconds: found 1, expected at least 2")
    (line,) = problems("fleet: {lease_seconds: 1, call_seconds_max: 0.1}")
    assert line.startswith("fleet.lease_seconds: found 1, expected at least 1.6")


def test_a_decision_log_of_one_of_several_is_refused(problems: Any, tmp_path: Path) -> None:
    """It could not be replayed."""
    (line,) = problems(f"state: redis://store\ndecision_log: {tmp_path / 'log'}")
    assert line.startswith("decision_log: found a file, expected null")


def test_further_paths_are_taken_as_they_are(load: Any) -> None:
    """One or many, in the file or in the environment."""
    assert load("paths: [/v2/rerank, /generate]").paths == ("/v2/rerank", "/generate")
    assert load("", QOS_PATHS='["/v2/rerank"]').paths == ("/v2/rerank",)


def test_a_decision_log_stands_beside_the_file_that_names_it(load: Any, tmp_path: Path) -> None:
    """Unless its path says where it is; it is off by default."""
    settings = load("decision_log: log.jsonl\ndecision_log_max_bytes: 1e6\ndecision_log_files: 2")
    assert settings.decision_log == tmp_path / "log.jsonl"
    assert (settings.decision_log_max_bytes, settings.decision_log_files) == (1_000_000, 2)
    assert load("", QOS_DECISION_LOG="log.jsonl").decision_log == tmp_path / "log.jsonl"
    assert load(f"decision_log: {tmp_path / 'other.jsonl'}").decision_log == tmp_path / "other.jsonl"
    assert load("decision_log: /dev/null").decision_log == Path("/dev/null")
    assert load("").decision_log is None


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("absent/log.jsonl", "whose folder does not exist"),
        (".", "which is a folder"),
        ("gateway.yaml/log.jsonl", "whose folder does not exist"),
    ],
)
def test_a_decision_log_that_cannot_be_written_is_refused(problems: Any, where: str, why: str) -> None:
    """Before the gateway starts, naming the setting and the path that was tried."""
    (line,) = problems(f"decision_log: {where}")
    assert line.startswith('decision_log: found "')
    assert line.endswith(f", {why}; expected a file that can be written")


def test_a_decision_log_that_this_user_may_not_write_is_refused(
    problems: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for permissions; root, who may write anything, is told otherwise for this test."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (line,) = problems("decision_log: log.jsonl")
    assert "which this user may not write" in line


@pytest.mark.parametrize("key", ["decision_log_max_bytes", "decision_log_files"])
def test_a_decision_log_has_room(problems: Any, key: str) -> None:
    """A log of no bytes, or of no files, is not a log."""
    (line,) = problems(f"{key}: 0")
    assert line == f"{key}: found 0, expected a whole number, 1 or more"


# ── the file itself ──────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The path that was looked at is in the message."""
    with pytest.raises(ConfigError, match=r"absent\.yaml: there is no such file"):
        load_settings(tmp_path / "absent.yaml", {})
    with pytest.raises(ConfigError, match="the file cannot be read"):
        load_settings(tmp_path, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server:\n  port: 1\n  port: 2\n", "line 3: the key port is given twice"),
        ("server: {port: 1\nmode: [", "not valid YAML"),
        ("server:\n\tport: 1\n", "line 2, column 1: not valid YAML"),
        ("a: b: c", "line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("server: !!python/name:os.system x", "not valid YAML"),
        ("server: *nowhere", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("mode: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_broken_yaml_says_where(problems: Any, text: str, says: str) -> None:
    """Line and column, and none of the text."""
    (line,) = problems(text)
    assert says in line


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """Rather than guessed at."""
    path = tmp_path / "gateway.yaml"
    path.write_bytes(b"mode: \xff\xfe")
    with pytest.raises(ConfigError, match="the file is not UTF-8 text"):
        load_settings(path, {})


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────


def test_secrets_are_not_printed(load: Any) -> None:
    """Neither by printing settings nor by turning them into JSON."""
    settings = load(
        "upstreams: [{name: a, url: 'http://a:1', api_key: hidden-1}]\nserver: {operations_token: hidden-2}"
    )
    assert settings.upstreams[0].api_key.get_secret_value() == "hidden-1"
    printed = (
        repr(settings) + str(settings) + settings.model_dump_json() + json.dumps(str(settings.model_dump()))
    )
    assert "hidden" not in printed


@pytest.mark.parametrize(
    "text",
    [
        "server: {operations_token: 'hidden value'}",
        "server: {operations_token: [hidden]}",
        "upstreams: [{name: a, url: 'http://a:1', api_key: 'hidden value'}]",
        "upstreams: [{name: a, url: 'http://user:hidden@a:1'}]",
        "upstreams: [{name: a, url: 'http://a:1?token=hidden'}]",
        "state: 'redis://:hidden@localhost:6379/zero'",
        "upstreams: [{name: a, api_key: *hidden",
        "upstreams: [{name: a, api_key: 'hidden",
        "upstreams: [{name: a, api_key: !hidden x}]",
    ],
)
def test_a_refusal_does_not_repeat_a_secret(problems: Any, text: str) -> None:
    """What a log may show holds no key, token or password, not even a wrong one."""
    assert not any("hidden" in line for line in problems(text))


@pytest.mark.parametrize("law", ["static", "compliance", "severity"])
def test_each_law_can_be_chosen(law: str, tmp_path: Path) -> None:
    """By its name."""
    path = tmp_path / "gateway.yaml"
    path.write_text(f"controller: {{law: {law}}}")
    assert load_settings(path, {}).controller.law == law


# ── TLS to an upstream ───────────────────────────────────────────────────────────────────────────────────


def behind_tls(**members: Any) -> str:
    return yaml.safe_dump({"upstreams": [{"name": "a", "url": "https://a:1", **members}]})


def test_certificates_stand_beside_the_file_that_names_them(load: Any, tmp_path: Path) -> None:
    """Unless their path says where they are; without a file the system's are trusted."""
    made = self_signed(tmp_path)
    for name in (made.name, str(made)):
        (upstream,) = load(behind_tls(tls_ca_file=name)).upstreams
        assert upstream.tls_ca_file == made
        assert upstream.tls_verify
    (upstream,) = load(behind_tls(tls_verify=False)).upstreams
    assert (upstream.tls_ca_file, upstream.tls_verify) == (None, False)
    environ = {"QOS_UPSTREAMS__0__TLS_CA_FILE": made.name}
    assert load(behind_tls(), **environ).upstreams[0].tls_ca_file == made


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("none.pem", "which does not exist"),
        ("gateway.yaml", "which holds no certificate"),
        (".", "which cannot be read: Is a directory"),
    ],
)
def test_certificates_that_cannot_be_read_are_refused(problems: Any, where: str, why: str) -> None:
    """Before the gateway starts, naming the setting and the path that was tried."""
    (line,) = problems(behind_tls(tls_ca_file=where))
    assert line.startswith('upstreams[0].tls_ca_file: found "')
    assert line.endswith(f", {why}; expected a file with certificates in PEM")


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"url": "http://a:1"}, 'found "ca.pem", while url is not https://; expected null'),
        ({"tls_verify": False}, 'found "ca.pem", while tls_verify is false; expected one of the two'),
    ],
)
def test_certificates_that_would_not_be_used_are_refused(
    problems: Any, members: dict[str, Any], says: str
) -> None:
    """Nobody is to think that an engine is checked when it is not."""
    assert problems(behind_tls(tls_ca_file="ca.pem", **members)) == [f"upstreams[0].tls_ca_file: {says}"]


def test_tls_verify_is_true_or_false(problems: Any) -> None:
    """A slip here must not pass for a no."""
    assert problems(behind_tls(tls_verify="maybe")) == [
        'upstreams[0].tls_verify: found "maybe", expected true or false'
    ]
