import asyncio

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gateway.telemetry.exposition import new_registry, render, render_in_turns
from gateway.telemetry.metrics import METRIC_NAMES, Metrics

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5"


def test_plain_text_by_default(metrics, registry, admission):
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


def test_rendering_in_turns_gives_the_same_page(metrics, registry, admission):
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
