"""One event loop for all of this folder, and one page of metrics to check names and labels against."""

from collections.abc import Set

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.observability.expressions import MADE_BY_PROMETHEUS, TARGET_LABELS, fleet_as_defined
from tests.observability.watched_gateway import watched_gateway


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def scraped(anyio_backend: str) -> dict[str, Set[str]]:
    """The labels of every series that a gateway shows after traffic, with those that Prometheus adds. Where
    there is no store, the fleet's are as they are defined."""
    async with watched_gateway() as watched:
        await watched.traffic()
        page = await watched.gateway.metrics()
    found: dict[str, Set[str]] = dict.fromkeys(MADE_BY_PROMETHEUS, TARGET_LABELS)
    if not watched.shares:
        found |= fleet_as_defined()
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, TARGET_LABELS) | sample.labels.keys()
    return found
