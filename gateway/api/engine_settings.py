"""Checked settings → the engines as the transport, the probes and the breaker want them."""

import asyncio

from gateway.mock_backend.child import MockGpus
from gateway.policy.clock import to_nanoseconds
from gateway.settings import Settings, UpstreamSettings
from gateway.upstream.circuit_breaker import BreakerRules
from gateway.upstream.client import UpstreamAddress
from gateway.upstream.engines import EngineSettings
from gateway.upstream.health import ProbeRules
from gateway.upstream.load_poller import LoadRules
from gateway.upstream.transport import TransportTimeouts


async def engine_settings(settings: Settings, mock_gpus: MockGpus) -> list[EngineSettings]:
    """Embedded mock GPUs are started, and waited for. Raises MockGpuError."""
    urls = await asyncio.gather(*(mock_gpus.url(u.name, u.url) for u in settings.upstreams))
    return [
        _engine(settings, upstream, url or upstream.url)
        for upstream, url in zip(settings.upstreams, urls, strict=True)
    ]


def _engine(settings: Settings, upstream: UpstreamSettings, url: str) -> EngineSettings:
    timeouts, breaker = settings.upstream_timeouts, settings.circuit_breaker
    health, key = upstream.health, upstream.api_key
    return EngineSettings(
        address=UpstreamAddress(
            name=upstream.name,
            url=url,
            models=tuple(upstream.models),
            credential=None if key is None else b"Bearer " + key.get_secret_value().encode(),
            engine_priority=upstream.engine_priority,
            tls_ca_file=upstream.tls_ca_file,
            tls_verify=upstream.tls_verify,
        ),
        configured_url=upstream.url,
        timeouts=TransportTimeouts(
            timeouts.connect_seconds, timeouts.first_byte_seconds, timeouts.idle_seconds
        ),
        probe=ProbeRules(health.path, health.interval_seconds, health.fail_after, health.pass_after),
        load=LoadRules(upstream.load.path, upstream.load.interval_seconds),
        breaker=BreakerRules(breaker.failures, to_nanoseconds(breaker.open_seconds)),
    )
