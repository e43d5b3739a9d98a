"""A registry of the gateway's own, and its page in the form a scraper asks for."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.exposition import choose_encoder

_END_OF_PAGE = b"# EOF\n"


def new_registry() -> CollectorRegistry:
    """With the process's CPU time, memory and open files, under their usual names (`process_…`)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry, accept_header: str | None) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics where the scraper accepts it, else Prometheus' text.

    To be called in the event loop's thread, like everything that counts.
    """
    parts, content_type = _render_parts(registry, accept_header)
    return b"".join(parts), content_type


async def render_in_turns(registry: CollectorRegistry, accept_header: str | None) -> tuple[bytes, str]:
    """The same, letting others run after each metric, and within a large one after each part of it: a whole
    page at once takes longer than a token does, and every stream would feel it."""
    parts, content_type = _render_parts(registry, accept_header)
    page = []
    for part in parts:
        page.append(part)
        await asyncio.sleep(0)
    return b"".join(page), content_type


class _Single:
    """One metric, or a part of it, looking like a registry."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


def _render_parts(registry: CollectorRegistry, accept_header: str | None) -> tuple[Iterator[bytes], str]:
    """A metric that the registry yields in several parts, one after the other, is one metric of the page."""
    encode, content_type = choose_encoder(accept_header or "")

    def parts() -> Iterator[bytes]:
        ends, begun = False, ""
        for metric in registry.collect():
            part = encode(_Single(metric))
            ends = part.endswith(_END_OF_PAGE)
            part = part.removesuffix(_END_OF_PAGE)
            if metric.name == begun:
                head = encode(_Single(Metric(metric.name, metric.documentation, metric.type)))
                part = part.removeprefix(head.removesuffix(_END_OF_PAGE))
            begun = metric.name
            yield part
        if ends:
            yield _END_OF_PAGE

    return parts(), content_type
