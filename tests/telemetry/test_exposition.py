import asyncio

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.policy.outcome import Outcome
from gateway.telemetry.exposition import new_registry, render, render_in_turns
from gateway.telemetry.metrics import METRIC_NAMES, Metrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"


def test_plain_text_by_default(metrics, registry, admission, fleet):
    """Without a wish the page is Prometheus' text, with a type for every metric."""
    body, content_type = render(registry, None)
    assert content_type.startswith("text/plain; version=0.0.4")
    names = {line.split()[2] for line in body.decode().splitlines() if line.startswith("# TYPE")}
    assert names == METRIC_NAMES
    assert list(parse_text(body.decode()))


def test_openmetrics_on_request(metrics, registry, admission, ended):
    """A scraper that accepts OpenMetrics gets it: strictly parsed, one end, no `_created` series."""
    metrics.ended(ended())
    body, content_type = render(registry, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert body.count(b"# EOF") == 1
    assert body.endswith(b"# EOF\n")
    assert b"_created" not in body
    families = {family.name: family for family in parse_openmetrics(body.decode())}
    assert families["qos_gateway_requests"].type == "counter"
    assert families["qos_gateway_queue_wait_seconds"].type == "histogram"


def test_rendering_in_turns_gives_the_same_page(metrics, registry, admission, fleet):
    """Others run while the page is made, and it is the same page."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scrape() -> tuple[bytes, str]:
        counter = asyncio.create_task(count_turns())
        try:
            return await render_in_turns(registry, OPENMETRICS)
        finally:
            counter.cancel()

    assert asyncio.run(scrape()) == render(registry, OPENMETRICS)
    assert turns >= len(METRIC_NAMES)


class Whole:
    """What a registry collects, with each metric in one piece."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> list[Metric]:
        metrics: dict[str, Metric] = {}
        for part in self._registry.collect():
            whole = metrics.setdefault(part.name, Metric(part.name, part.documentation, part.type))
            whole.samples.extend(part.samples)
        return list(metrics.values())


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_thousands_of_tenants_are_many_turns_and_one_metric(registry, parameters, clock, ended, accept):
    """No part of the page is long, and together they are what the library makes of the whole at once."""
    tenants = [f"tenant-{n}" for n in range(2_000)]
    metrics = Metrics(
        None,
        registry,
        parameters=parameters,
        clock=clock,
        version="1",
        max_label_values=2_000,
        known_tenants=tenants,
    )
    for tenant in tenants:
        metrics.ended(ended(tenant=tenant, outcome=Outcome.COMPLETED))
    lines = []

    async def scrape() -> tuple[bytes, str]:
        page = asyncio.create_task(render_in_turns(registry, accept))
        while not page.done():
            lines.append(0)
            await asyncio.sleep(0)
        return await page

    body, content_type = asyncio.run(scrape())
    encode, wanted_type = choose_encoder(accept)
    assert (body, content_type) == (encode(Whole(registry)), wanted_type)
    assert len(lines) >= len(tenants) / 50


def test_own_registry_tells_of_the_process(parameters, clock):
    """CPU time and memory of the process are on the page; the garbage collector is not."""
    registry = new_registry()
    Metrics(None, registry, parameters=parameters, clock=clock, version="1")
    text = render(registry, "")[0].decode()
    assert "process_cpu_seconds_total " in text
    assert "process_resident_memory_bytes " in text
    assert "python_gc" not in text


def test_two_registries_do_not_share_counts(metrics, registry, parameters, clock, ended):
    """A test, or an application, has metrics of its own."""
    other = new_registry()
    Metrics(None, other, parameters=parameters, clock=clock, version="1")
    metrics.client_retried()
    assert b"qos_gateway_client_retries_total 1.0" in render(registry, None)[0]
    assert b"qos_gateway_client_retries_total 0.0" in render(other, None)[0]
