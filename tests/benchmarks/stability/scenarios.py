"""What the laws go through: loads that change, engines that change, constants that are wrong.

One times the load is 6 requests a second with the lengths of conversations, which asks for 12,000 weighted
tokens per second on average: what the engine can bear. Classes are drawn, P0/P1/P2 30/45/25 % where nothing
else is said.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random

from gateway.mock_backend.gpu_model import PRESETS, GpuPreset
from gateway.policy.clock import NANOSECONDS_PER_SECOND, Clock, to_seconds
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Priority
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings
from gateway.simulator.traffic import is_coarse, spread
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Arrival,
    Caller,
    LengthSource,
    TraceRow,
    Workload,
    generator,
    read_trace,
    recorded_lengths,
)

PRESET = "a100_llama3_8b"
CAPACITY = 12_000.0
REQUESTS_PER_SECOND = 6.0
MIX = (0.30, 0.45, 0.25)
OTHER_MIX = (0.20, 0.50, 0.30)
CONVERSATIONS = "azure_llm_2023_conv.csv"
TRACES = {
    "Azure conversations": CONVERSATIONS,
    "Azure code": "azure_llm_2023_code.csv",
    "Mooncake conversations": "mooncake_conversation.csv",
    "ServeGen sample": "servegen_r1_sample_30min.csv",
}


@dataclass(frozen=True)
class Load:
    """Poisson arrivals; `steps` are (from second, times the load). `retries`: as SDKs do."""

    steps: tuple[tuple[float, float], ...]
    mix: tuple[float, ...] = MIX
    retries: int = 0
    trace: str | None = None
    """Instead of Poisson arrivals, at the mean rate of the first step."""


@dataclass(frozen=True)
class Slowdown:
    factor: float
    from_seconds: float
    to_seconds: float


@dataclass(frozen=True)
class Control:
    """How a run is controlled. `law` None: no gateway. `capacity`, `gain` and `lag_seconds` are off on
    purpose where a scenario wants to know what becomes of it."""

    title: str
    law: str | None
    capacity: float = CAPACITY
    gain: float = 1.0
    lag_seconds: int = 0


NONE = Control("no gateway", None)
STATIC = Control("static", "static")
COMPLIANCE = Control("compliance", "compliance")
SEVERITY = Control("severity", "severity")
ALL = (NONE, STATIC, COMPLIANCE, SEVERITY)
LAWS = (STATIC, COMPLIANCE, SEVERITY)
STATIC_SWEEP = tuple(
    Control(f"static, C {capacity:,.0f}", "static", capacity) for capacity in (11_000, 13_000, 13_500, 14_000)
)


@dataclass(frozen=True)
class Scenario:
    """`settled` are spans of seconds over which C must be steady: (from, to)."""

    name: str
    seconds: float
    load: Load
    controls: Sequence[Control] = LAWS
    slowdown: Slowdown | None = None
    settled: tuple[tuple[float, float], ...] = ()
    from_seconds: float = 60.0
    """What came before is the beginning, and not counted."""


def steady(times: float, **given: object) -> Load:
    return Load(steps=((0.0, times),), **given)  # type: ignore[arg-type]


def scenarios(with_traces: bool) -> Iterator[Scenario]:
    yield Scenario("steady overload, 2×", 360, steady(2), (*ALL, *STATIC_SWEEP), settled=((60, 360),))
    yield Scenario(
        "the same, mix 20/50/30", 360, steady(2, mix=OTHER_MIX), (*ALL, *STATIC_SWEEP), settled=((60, 360),)
    )
    yield Scenario(
        "1 demand 1× → 2× → 1×",
        540,
        Load(((0, 1), (120, 2), (360, 1))),
        ALL,
        settled=((180, 360), (390, 540)),
    )
    yield Scenario("2 engine 1.5× slower for 150 s", 480, steady(2), ALL, Slowdown(1.5, 120, 270))
    for factor in (0.5, 1.5):
        wrong = tuple(replace(control, capacity=CAPACITY * factor) for control in LAWS)
        yield Scenario(f"3 first C {factor:g}× of right", 360, steady(2), wrong, settled=((120, 360),))
    gains = (0.32, 0.56, 1.0, 1.8, 3.2)
    swept = tuple(replace(SEVERITY, title=f"severity, gains × {g:g}", gain=g) for g in gains)
    yield Scenario("4 gains over a decade", 360, steady(2), swept, settled=((60, 360),))
    lags = (0, 2, 5, 10, 20)
    late = tuple(
        replace(law, title=f"{law.law}, {lag} s late", lag_seconds=lag)
        for law in (COMPLIANCE, SEVERITY)
        for lag in lags
    )
    yield Scenario("5 signals that come late", 360, steady(2), late, settled=((60, 360),))
    yield Scenario(
        "6 ten quiet minutes, then 3×",
        840,
        Load(((0, 0.3), (600, 3))),
        ALL,
        settled=((660, 840),),
        from_seconds=600,
    )
    yield Scenario("7 constant 3×", 600, steady(3), ALL, settled=((60, 600),))
    yield Scenario("8 retries, 2×", 360, steady(2, retries=2), ALL, settled=((60, 360),))
    if with_traces:
        for name in TRACES:
            yield Scenario(f"9 {name}, 2×", 600, steady(2, trace=name), ALL)


# ---------------------------------------------------------------------- one run's parts


def parameters_of(control: Control) -> PolicyParameters:
    law = control.law or "static"
    settings = Settings(
        upstreams=[{"name": "gpu0", "url": f"mock://{PRESET}"}],  # type: ignore[arg-type]
        capacity={"tokens_per_second": control.capacity},  # type: ignore[arg-type]
        controller={"law": law},  # type: ignore[arg-type]
    )
    return policy_parameters(settings)


def workload_of(load: Load, traces: Path | None, seed: int) -> Workload:
    if load.trace is None:
        return Workload(open=[SteppedPoisson(load, _lengths(traces))], retries=load.retries)
    assert traces is not None
    rows = _rows(traces / TRACES[load.trace])
    return Workload(
        open=[ScaledTrace(load, spread(rows, generator(seed, "spread")) if is_coarse(rows) else rows)]
    )


@cache
def _rows(path: Path) -> list[TraceRow]:
    return read_trace(path)


def _lengths(traces: Path | None) -> LengthSource:
    return CHAT_LENGTHS if traces is None else recorded_lengths(_rows(traces / CONVERSATIONS))


def _callers() -> list[Caller]:
    return [Caller(p, tenant=p.name) for p in PRIORITIES]


@dataclass(frozen=True)
class SteppedPoisson:
    load: Load
    lengths: LengthSource
    caller: Caller = field(default_factory=lambda: Caller(Priority.P1))

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        callers = _callers()
        ends = [start for start, _ in self.load.steps[1:]] + [float("inf")]
        for (at, times), end in zip(self.load.steps, ends, strict=True):
            while True:
                at += random.expovariate(times * REQUESTS_PER_SECOND)
                if at >= end:
                    break
                (caller,) = random.choices(callers, self.load.mix)
                yield Arrival(round(at * NANOSECONDS_PER_SECOND), self.lengths.draw(random), caller)


@dataclass(frozen=True)
class ScaledTrace:
    """A trace with its time scaled, so that it asks for so many times 12,000 weighted tokens per second."""

    load: Load
    rows: Sequence[TraceRow]
    caller: Caller = field(default_factory=lambda: Caller(Priority.P1))

    def arrivals(self, random: Random) -> Iterator[Arrival]:
        callers = _callers()
        tokens = sum(row.lengths.input_tokens + 4 * row.lengths.output_tokens for row in self.rows)
        span = to_seconds(self.rows[-1].at - self.rows[0].at)
        speed = self.load.steps[0][1] * CAPACITY / (tokens / span)
        for row in self.rows:
            (caller,) = random.choices(callers, self.load.mix)
            yield Arrival(round(row.at / speed), row.lengths, caller)


@dataclass(frozen=True)
class ChangingPreset(GpuPreset):
    """A GPU that is slower for a while. It is given a clock when there is one."""

    slowdown: Slowdown | None = None
    clocks: list[Clock] = field(default_factory=list)

    def iteration_ns(self, prefill_tokens: int, attention: float, decoding: int, kv_tokens: int) -> int:
        duration = super().iteration_ns(prefill_tokens, attention, decoding, kv_tokens)
        slow = self.slowdown
        if slow is not None and slow.from_seconds <= to_seconds(self.clocks[0].now()) < slow.to_seconds:
            return round(duration * slow.factor)
        return duration


def preset_of(scenario: Scenario) -> ChangingPreset:
    return ChangingPreset(**vars(PRESETS[PRESET]), slowdown=scenario.slowdown)
