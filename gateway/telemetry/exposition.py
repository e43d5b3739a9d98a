"""A registry of the gateway's own, and its page in the form a scraper asks for."""

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder


def new_registry() -> CollectorRegistry:
    """With the process's CPU time, memory and open files, under their usual names (`process_…`)."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry, accept_header: str | None) -> tuple[bytes, str]:
    """The page and its content type: OpenMetrics where the scraper accepts it, else Prometheus' text.

    To be called in the event loop's thread, like everything that counts.
    """
    encode, content_type = choose_encoder(accept_header or "")
    return encode(registry), content_type
