"""Every setting: its name, its default, what it may be. `config/gateway.yaml` explains them to operators.

A configuration is read once, at the edge, and checked as a whole; the rest of the gateway gets finished,
frozen values. Settings come from a YAML file, then from the environment, which wins. What is left out
inherits its default, at every level: a file that sets only `classes.P0.max_wait_seconds` keeps all else.
Only lists and the free mappings (`routes`, `tokenizers`, `headers`) are replaced whole.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.config_environment import LEVEL, PREFIX, Overrides, overlay, read_environment
from gateway.config_reading import (
    ConfigError,
    Location,
    Problem,
    Section,
    dotted,
    located_problems,
    read_yaml,
    refuse,
    shown,
)
from gateway.config_values import (
    CLASS_NAMES,
    Amount,
    ClassName,
    Count,
    CountOrNull,
    FleetName,
    Fraction,
    HeaderName,
    HeaderNameList,
    HeaderValue,
    Host,
    HttpUrl,
    Name,
    NameList,
    Port,
    PositiveAmount,
    PositiveCount,
    PositiveFraction,
    PositiveSeconds,
    PositiveSecondsOrNull,
    Seconds,
    Secret,
    State,
    TokensPerSecond,
    TokensPerSecondOrNull,
    UpstreamUrl,
    UrlPath,
    is_loopback,
    why_no_certificates,
)

SHARE_SUM_TOLERANCE: Final = 1e-6
"""Shares are written in decimals, whose sum in binary is seldom exactly 1."""

SLICE_SECONDS_MAX: Final = 0.5
"""That a class is active at another gateway holds for a second."""
SILENCE_SECONDS_MIN: Final = 1.5
"""A gateway takes a store for silent after a second, and then holds its share for a while: it lets its lease
end early, by the longest pause between attempts (0.4 s) and a call."""

_WILDCARD_HOSTS: Final = ("0.0.0.0", "::")

Mode = Literal["enforce", "observe"]


class ServerSettings(Section):
    host: Host = "127.0.0.1"
    """Where tenants are served; 0.0.0.0 is every address of the machine."""
    port: Port = 8000
    operations_host: Host = "127.0.0.1"
    """Where operators are served; from elsewhere than this machine only with a token."""
    operations_port: Port = 8001
    operations_token: Secret = None
    max_body_bytes: PositiveCount = 10_485_760
    body_read_seconds: PositiveSeconds = 30.0
    write_idle_seconds: PositiveSeconds = 30.0
    drain_seconds: Seconds = 30.0

    def _problems(self) -> Iterator[Problem]:
        if self.operations_token is None and not is_loopback(self.operations_host):
            found = f"found null, while operations_host {self.operations_host} can be reached from elsewhere"
            yield Problem(("operations_token",), f"{found}; expected a token, or operations_host 127.0.0.1")
        hosts = {self.host, self.operations_host}
        meets = len(hosts) == 1 or not hosts.isdisjoint(_WILDCARD_HOSTS)
        if self.port == self.operations_port != 0 and meets:
            yield Problem(("operations_port",), f"found {self.port}, expected another port than server.port")


class HealthSettings(Section):
    path: UrlPath = "/health"
    interval_seconds: PositiveSeconds = 2.0
    """From one probe to the next, and the longest that one may take, up to 2 s."""
    fail_after: PositiveCount = 3
    pass_after: PositiveCount = 1


class LoadSettings(Section):
    path: UrlPath = "/metrics"
    """The engine's metrics page, in Prometheus' text form."""
    interval_seconds: PositiveSeconds = 1.0
    """From one look at it to the next."""
    stale_after_seconds: PositiveSeconds = 5.0
    waiting_high: Amount = 4.0
    kv_high: PositiveFraction = 0.9


class UpstreamSettings(Section):
    name: Name
    url: UpstreamUrl
    models: NameList = ("*",)
    api_key: Secret = None
    tls_ca_file: Path | None = None
    """PEM certificates to trust instead of the system's."""
    tls_verify: bool = True
    tokens_per_second: TokensPerSecondOrNull = None
    """This upstream's part of the capacity; None: `capacity.tokens_per_second`."""
    max_in_flight: CountOrNull = 128
    max_in_flight_tokens: CountOrNull = None
    accepts: Literal["any", "long", "short"] = "any"
    engine_priority: Literal["none", "vllm", "sglang"] = "none"
    health: HealthSettings = HealthSettings()
    load: LoadSettings = LoadSettings()

    def _problems(self) -> Iterator[Problem]:
        if self.tls_ca_file is None:
            return
        found = f"found {shown(str(self.tls_ca_file))}"
        if not self.url.startswith("https://"):
            yield Problem(("tls_ca_file",), f"{found}, while url is not https://; expected null")
        elif not self.tls_verify:
            yield Problem(("tls_ca_file",), f"{found}, while tls_verify is false; expected one of the two")


class UpstreamTimeouts(Section):
    connect_seconds: PositiveSeconds = 5.0
    """For a connection to an engine, its TLS included."""
    first_byte_seconds: PositiveSeconds = 300.0
    idle_seconds: PositiveSeconds = 60.0
    no_upstream_seconds: Seconds = 10.0


class CircuitBreakerSettings(Section):
    failures: PositiveCount = 5
    open_seconds: PositiveSeconds = 10.0


class CapacitySettings(Section):
    tokens_per_second: TokensPerSecond = 12_000.0
    burst_seconds: PositiveSeconds = 0.5
    min_burst_tokens: Count = 8192
    output_quantile: PositiveFraction = 0.9
    initial_output_tokens: Count = 256
    output_weight: Amount = 4.0
    cache_weight: Fraction = 0.1
    max_request_tokens: CountOrNull = 131_072
    max_debt_seconds: Seconds = 10.0


class LatencyTargets(Section):
    """What a class is promised; a target of None is not promised."""

    ttft_seconds: PositiveSecondsOrNull = None
    tpot_seconds: PositiveSecondsOrNull = None
    max_gap_seconds: PositiveSecondsOrNull = None


class ClassSettings(Section):
    share: Fraction
    ceiling_share: Fraction
    weight: PositiveAmount
    max_throttle_seconds: Seconds
    max_wait_seconds: Seconds
    max_queued_requests: CountOrNull
    """Requests that may wait, for tokens or a place."""
    max_queued_bytes: CountOrNull
    """Bytes of their bodies."""
    holdback: Fraction
    slo: LatencyTargets | None
    mode: Mode | None = None

    def _problems(self) -> Iterator[Problem]:
        if self.ceiling_share < self.share:
            expected = f"a fraction not below the class's share of {self.share:g}"
            yield Problem(("ceiling_share",), f"found {self.ceiling_share:g}, expected {expected}")


_CLASS_DEFAULTS: Final[dict[ClassName, dict[str, Any]]] = {
    "P0": {
        "share": 0.60,
        "ceiling_share": 1.0,
        "weight": 1.0,
        "max_throttle_seconds": 0.5,
        "max_wait_seconds": 2.0,
        "max_queued_requests": 500,
        "max_queued_bytes": 67_108_864,
        "holdback": 1.0,
        "slo": {"ttft_seconds": 1.0, "tpot_seconds": 0.06, "max_gap_seconds": None},
    },
    "P1": {
        "share": 0.35,
        "ceiling_share": 1.0,
        "weight": 1.0,
        "max_throttle_seconds": 5.0,
        "max_wait_seconds": 15.0,
        "max_queued_requests": 1000,
        "max_queued_bytes": 134_217_728,
        "holdback": 0.9,
        "slo": {"ttft_seconds": 3.0, "tpot_seconds": 0.10, "max_gap_seconds": None},
    },
    "P2": {
        "share": 0.05,
        "ceiling_share": 0.5,
        "weight": 1.0,
        "max_throttle_seconds": 60.0,
        "max_wait_seconds": 120.0,
        "max_queued_requests": 2000,
        "max_queued_bytes": 268_435_456,
        "holdback": 0.7,
        "slo": None,
    },
}


def _inheriting(name: ClassName) -> BeforeValidator:
    """Each class has defaults of its own, so what is given for one lies over those."""
    return BeforeValidator(lambda given: _lay_over(_CLASS_DEFAULTS[name], given))


def _lay_over(defaults: object, given: object) -> object:
    if not isinstance(defaults, Mapping) or not isinstance(given, Mapping):
        return given
    return {**defaults, **{key: _lay_over(defaults.get(key), value) for key, value in given.items()}}


class Classes(Section):
    P0: Annotated[ClassSettings, _inheriting("P0")] = Field(default_factory=dict, validate_default=True)
    P1: Annotated[ClassSettings, _inheriting("P1")] = Field(default_factory=dict, validate_default=True)
    P2: Annotated[ClassSettings, _inheriting("P2")] = Field(default_factory=dict, validate_default=True)

    def __getitem__(self, name: str) -> ClassSettings:
        return {"P0": self.P0, "P1": self.P1, "P2": self.P2}[name]

    def _problems(self) -> Iterator[Problem]:
        total = sum(self[name].share for name in CLASS_NAMES)
        if abs(total - 1) > SHARE_SUM_TOLERANCE:
            summands = " + ".join(f"{name}.share {self[name].share:g}" for name in CLASS_NAMES)
            yield Problem((), f"found {summands} = {total:.6g}, expected shares with a sum of 1")


class SkipLimits(Section):
    P1: PositiveCount = 2
    P2: PositiveCount = 19

    def __getitem__(self, name: str) -> int:
        return {"P1": self.P1, "P2": self.P2}[name]


class SchedulingSettings(Section):
    skip_limit: SkipLimits = SkipLimits()
    long_prompt_tokens: PositiveCount = 8192
    long_prompt_lane: Count = 1
    long_prompt_duty: PositiveFraction = 0.04
    max_pending_prefill_tokens: Count = 4096
    deadline_drop: bool = True


class ClassificationSettings(Section):
    header: HeaderNameList = ("x-request-priority",)
    service_tier: bool = True
    routes: Mapping[UrlPath, ClassName] = {"/v1/embeddings": "P2"}
    default: ClassName = "P1"
    on_exceed: Literal["downgrade", "reject"] = "downgrade"


class SloSettings(Section):
    window_requests: PositiveCount = 1000
    window_seconds: PositiveSeconds = 60.0
    target: PositiveFraction = 0.99
    tighten_below: Fraction = 0.95

    def _problems(self) -> Iterator[Problem]:
        if self.tighten_below > self.target:
            expected = f"a fraction not above slo.target, which is {self.target:g}"
            yield Problem(("tighten_below",), f"found {self.tighten_below:g}, expected {expected}")


class ClassFloors(Section):
    P0: Fraction = 0.30
    P1: Fraction = 0.10
    P2: Fraction = 0.01

    def __getitem__(self, name: str) -> float:
        return {"P0": self.P0, "P1": self.P1, "P2": self.P2}[name]

    def _problems(self) -> Iterator[Problem]:
        total = self.P0 + self.P1 + self.P2
        if total > 1 + SHARE_SUM_TOLERANCE:
            yield Problem((), f"found floors that add up to {total:.6g}, expected a sum up to 1")


class ControllerSettings(Section):
    law: Literal["static", "compliance", "severity"] = "severity"
    cooldown_seconds: PositiveSeconds = 5.0
    min_samples: PositiveCount = 20
    capacity_bounds: tuple[PositiveAmount, PositiveAmount] = (0.2, 3.0)
    class_floor: ClassFloors = ClassFloors()

    def _problems(self) -> Iterator[Problem]:
        low, high = self.capacity_bounds
        if not low <= 1 <= high:
            expected = "a lower bound up to 1 and an upper bound from 1 on"
            yield Problem(("capacity_bounds",), f"found {low:g} and {high:g}, expected {expected}")


class MetricsSettings(Section):
    max_label_values: PositiveCount = 200


class LoggingSettings(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class TracingSettings(Section):
    """Where spans are sent: OTLP over HTTP."""

    endpoint: HttpUrl = "http://127.0.0.1:4318/v1/traces"
    sample_ratio: Fraction = 1.0
    service_name: Name = "qos-gateway"
    """Who the spans are said to be from."""
    headers: Mapping[HeaderName, HeaderValue] = {}


class FleetSettings(Section):
    """Gateways that share their budget through `state`."""

    name: FleetName = "qos-gateway"
    replicas_assumed: PositiveCount = 1
    slice_seconds: PositiveSeconds = 0.1
    lease_seconds: PositiveSeconds = 10.0
    call_seconds_max: PositiveSeconds = 0.5

    def _problems(self) -> Iterator[Problem]:
        if self.slice_seconds > SLICE_SECONDS_MAX:
            expected = f"at most {SLICE_SECONDS_MAX:g}: what is known of other gateways grows old"
            yield Problem(("slice_seconds",), f"found {self.slice_seconds:g}, expected {expected}")
        call = self.call_seconds_max
        longest = max(10 * self.slice_seconds, 4 * call, SILENCE_SECONDS_MIN + call)
        if self.lease_seconds < longest:
            why = f"ten slices, four calls that time out, and {SILENCE_SECONDS_MIN:g} seconds and such a call"
            expected = f"at least {longest:g}: {why}"
            yield Problem(("lease_seconds",), f"found {self.lease_seconds:g}, expected {expected}")


class Settings(BaseSettings):
    """The whole configuration. `Settings()` is the defaults; `load_settings` reads file and environment."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter=LEVEL,
        hide_input_in_errors=True,
    )

    server: ServerSettings = ServerSettings()
    mode: Mode = "enforce"
    state: State = Field(default="memory", repr=False)  # an address may hold a password
    fleet: FleetSettings = FleetSettings()
    decision_log: Path | None = None
    decision_log_max_bytes: PositiveCount = 104_857_600
    decision_log_files: PositiveCount = 5
    upstreams: tuple[UpstreamSettings, ...] = (UpstreamSettings(name="gpu0", url="mock://seed_32k"),)
    upstream_timeouts: UpstreamTimeouts = UpstreamTimeouts()
    upstream_retry_budget: Fraction = 0.1
    circuit_breaker: CircuitBreakerSettings = CircuitBreakerSettings()
    tokenizers: Mapping[Name, Path] = {}
    paths: tuple[UrlPath, ...] | None = None
    capacity: CapacitySettings = CapacitySettings()
    classes: Classes = Field(default_factory=lambda: Classes.model_validate({}))
    scheduling: SchedulingSettings = SchedulingSettings()
    classification: ClassificationSettings = ClassificationSettings()
    keys_file: Path | None = None
    slo: SloSettings = SloSettings()
    controller: ControllerSettings = ControllerSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the caller passes: `load_settings` lays the environment over the file itself, because
        an error must name the one that is at fault, and because tests must not depend on the environment."""
        return (init_settings,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse([*self._state_problems(), *self._upstream_problems(), *self._floor_problems()])
        return self

    @property
    def store_url(self) -> str | None:
        """Where the state is that several gateways share; None where nothing is shared."""
        return None if self.state == "memory" else self.state

    def _state_problems(self) -> Iterator[Problem]:
        if self.store_url and self.decision_log:
            says = "found a file, expected null: what one gateway of several decides cannot be replayed alone"
            yield Problem(("decision_log",), says)

    def _upstream_problems(self) -> Iterator[Problem]:
        if not self.upstreams:
            yield Problem(("upstreams",), "found an empty list, expected at least one upstream")
        names = [upstream.name for upstream in self.upstreams]
        for index, name in enumerate(names):
            if name in names[:index]:
                says = f'found "{name}", which upstreams[{names.index(name)}] has; expected unique names'
                yield Problem(("upstreams", index, "name"), says)

    def _floor_problems(self) -> Iterator[Problem]:
        for name in CLASS_NAMES:
            floor, share = self.controller.class_floor[name], self.classes[name].share
            if floor > share:
                says = f"found {floor:g}, expected a floor not above classes.{name}.share, which is {share:g}"
                yield Problem(("controller", "class_floor", name), says)


def load_settings(path: Path | None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of the file at `path` (none: the defaults) with the environment's `QOS_…` on top.

    A relative `keys_file`, `tls_ca_file`, `decision_log` or tokenizer is meant from the file's folder. Raises
    `ConfigError`.
    """
    overrides = read_environment(os.environ if environ is None else environ, Settings)
    tree = read_yaml(path) if path else None
    if not isinstance(tree, Mapping | None):
        raise ConfigError([f"{path}: found {shown(tree)}, expected a mapping of settings"])
    tree = overlay(dict(tree or {}), overrides, {"upstreams": [{"name": "gpu0", "url": "mock://seed_32k"}]})
    for key in tree:
        if not isinstance(key, str):
            raise ConfigError([f"{path}: found the key {shown(key)}, expected the name of a setting"])
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        problems = located_problems(error, Settings, tree)
        raise ConfigError(_sentence(path, overrides, *problem) for problem in problems) from None
    if path and settings.keys_file:
        settings = settings.model_copy(update={"keys_file": path.parent / settings.keys_file})
    if any(upstream.tls_ca_file for upstream in settings.upstreams):
        trusting = tuple(
            _with_ca_file(path, overrides, index, upstream)
            for index, upstream in enumerate(settings.upstreams)
        )
        settings = settings.model_copy(update={"upstreams": trusting})
    if path and settings.tokenizers:
        tokenizers = {model: path.parent / file for model, file in settings.tokenizers.items()}
        settings = settings.model_copy(update={"tokenizers": tokenizers})
    if settings.decision_log:
        log = path.parent / settings.decision_log if path else settings.decision_log
        reason = _why_not_writable(log)
        if reason:
            says = f"found {shown(str(log))}, {reason}; expected a file that can be written"
            raise ConfigError([_sentence(path, overrides, ("decision_log",), says)])
        settings = settings.model_copy(update={"decision_log": log})
    return settings


def _with_ca_file(
    path: Path | None, overrides: Overrides, index: int, upstream: UpstreamSettings
) -> UpstreamSettings:
    if upstream.tls_ca_file is None:
        return upstream
    ca_file = path.parent / upstream.tls_ca_file if path else upstream.tls_ca_file
    reason = why_no_certificates(ca_file)
    if reason:
        says = f"found {shown(str(ca_file))}, {reason}; expected a file with certificates in PEM"
        raise ConfigError([_sentence(path, overrides, ("upstreams", index, "tls_ca_file"), says)])
    return upstream.model_copy(update={"tls_ca_file": ca_file})


def _why_not_writable(path: Path) -> str | None:
    if path.is_dir():
        return "which is a folder"
    if not path.parent.is_dir():
        return "whose folder does not exist"
    is_device = path.exists() and not path.is_file()
    wanted = [path] if is_device else [path.parent, path]  # other files will stand beside it
    if all(os.access(each, os.W_OK) for each in wanted if each.exists()):
        return None
    return "which this user may not write"


def _sentence(path: Path | None, overrides: Overrides, location: Location, says: str) -> str:
    speakers = overrides.setting(location) or [str(path or "settings"), *overrides.inside(location)]
    key = dotted(location)
    return " and ".join(speakers) + (f": {key}: {says}" if key else f": {says}")
