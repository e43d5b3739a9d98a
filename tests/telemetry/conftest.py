import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.policy.admission import Admission
from gateway.policy.clock import NANOSECONDS_PER_SECOND, ManualClock
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import ClassParameters, PolicyParameters, SloTargets, UpstreamParameters
from gateway.policy.request import Priority, Usage
from gateway.telemetry.exposition import render
from gateway.telemetry.metrics import Metrics

MS = NANOSECONDS_PER_SECOND // 1000


@dataclass(frozen=True)
class Page:
    """A scraped page: sample values by name and labels."""

    text: str
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples.get((f"qos_gateway_{name}", frozenset(labels.items())))

    def total(self, name: str, **labels: str) -> float:
        """Sum over all series that have these labels among theirs."""
        return sum(
            value
            for (sample, has), value in self.samples.items()
            if sample == f"qos_gateway_{name}" and has >= set(labels.items())
        )

    def label_values(self, name: str, label: str) -> set[str]:
        return {dict(has)[label] for sample, has in self.samples if sample == f"qos_gateway_{name}" and has}

    def bounds(self, name: str) -> list[float]:
        """The finite bucket bounds of a histogram."""
        found = {
            float(dict(has)["le"]) for sample, has in self.samples if sample == f"qos_gateway_{name}_bucket"
        }
        return sorted(found - {float("inf")})


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(10**9)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def parameters() -> PolicyParameters:
    second = NANOSECONDS_PER_SECOND
    return PolicyParameters(
        classes={
            Priority.P0: ClassParameters(
                share=0.6, max_wait_ns=2 * second, slo=SloTargets(1 * second, 60 * MS)
            ),
            Priority.P1: ClassParameters(
                share=0.35, max_wait_ns=15 * second, slo=SloTargets(3 * second, 100 * MS, 700 * MS)
            ),
            Priority.P2: ClassParameters(share=0.05, max_wait_ns=120 * second),
        },
        upstreams=(UpstreamParameters("gpu0", max_in_flight=4), UpstreamParameters("gpu1", max_in_flight=4)),
    )


@pytest.fixture
def metrics(registry: CollectorRegistry, parameters: PolicyParameters, clock: ManualClock) -> Metrics:
    return Metrics(None, registry, parameters=parameters, clock=clock, version="1.2.3", max_label_values=20)


@dataclass
class KnownFleet:
    state: str = "shared"
    replicas: int = 3
    leads: bool = False


@pytest.fixture
def fleet(metrics: Metrics) -> KnownFleet:
    """With it the page has what is told of a fleet."""
    fleet = KnownFleet()
    metrics.watch_fleet(fleet)
    return fleet


@pytest.fixture
def admission(metrics: Metrics, parameters: PolicyParameters, clock: ManualClock) -> Admission:
    admission = Admission(parameters, clock, metrics)
    metrics.watch(admission)
    return admission


@pytest.fixture
def scrape(registry: CollectorRegistry) -> Callable[[], Page]:
    def scrape() -> Page:
        text = render(registry, None)[0].decode()
        samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in samples, "a series appears twice"
                samples[key] = sample.value
        return Page(text, samples)

    return scrape


@pytest.fixture
def ended() -> Callable[..., RequestEnded]:
    """Builds the record of a stream that went well, but for what the test says."""

    def ended(**changes: Any) -> RequestEnded:
        facts: dict[str, Any] = {
            "request_id": "req-1",
            "priority": Priority.P0,
            "tenant": "team-a",
            "model": "llama",
            "outcome": Outcome.COMPLETED,
            "streaming": True,
            "upstream": "gpu0",
            "arrived_at": 0,
            "ended_at": 6500 * MS,
            "queue_wait_ns": 3000 * MS,
            "ttft_ns": 3500 * MS,
            "upstream_ttft_ns": 500 * MS,
            "tpot_ns": 25 * MS,
            "max_gap_ns": 70 * MS,
            "usage": Usage(800, 120, 300),
            "estimated_cost": 1_500_000,
            "charged": 1_280_000,
            "promoted": False,
        }
        return RequestEnded(**(facts | changes))

    return ended


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Puts the process's logging back as it was."""
    root = logging.getLogger()
    names = ("uvicorn", "uvicorn.error", "uvicorn.access", "httpx", "httpcore", "asyncio", "urllib3")
    loggers = [root, *(logging.getLogger(name) for name in names)]
    before = [
        (logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in loggers
    ]
    yield
    structlog.reset_defaults()
    for logger, handlers, level, propagate, disabled in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
