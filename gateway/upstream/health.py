"""Is an engine alive? Probed at a steady pace, with hysteresis so that one late answer changes nothing.

An upstream counts as healthy until its first failed probe. Once it has passed a probe it takes
`fail_after` failures in a row to count it out, and `pass_after` passes in a row to let it in again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.upstream.client import Upstream
from gateway.upstream.errors import UpstreamError
from gateway.upstream.transport import TransportTimeouts

PROBE_SECONDS_MAX = 2.0
_BODY_BYTES_MAX = 65536


@dataclass(frozen=True, slots=True)
class ProbeRules:
    path: str = "/health"
    interval_seconds: float = 2.0
    fail_after: int = 3
    pass_after: int = 1


class Hysteresis:
    """Probe results → healthy or not."""

    def __init__(self, rules: ProbeRules) -> None:
        self._rules = rules
        self.healthy = True
        self._proven = False
        self._in_a_row = 0  # of results that contradict `healthy`

    def result(self, passed: bool) -> bool:
        """Take in one result; answers whether `healthy` changed."""
        if passed == self.healthy:
            self._in_a_row = 0
            self._proven = self._proven or passed
            return False
        self._in_a_row += 1
        needed = self._rules.pass_after if passed else self._rules.fail_after if self._proven else 1
        if self._in_a_row < needed:
            return False
        self.healthy = passed
        self._in_a_row = 0
        self._proven = True
        return True


class HealthProbe:
    """Probes one upstream for as long as `run` is awaited.

    `on_change(name, healthy, why)` is called at every change; `why` is a phrase for the log.
    """

    def __init__(
        self, upstream: Upstream, rules: ProbeRules, on_change: Callable[[str, bool, str], None]
    ) -> None:
        self._upstream = upstream
        self._rules = rules
        self._on_change = on_change
        self._hysteresis = Hysteresis(rules)
        seconds = min(PROBE_SECONDS_MAX, max(rules.interval_seconds, 0.1))
        self._timeouts = TransportTimeouts(seconds, seconds, seconds)

    @property
    def healthy(self) -> bool:
        return self._hysteresis.healthy

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.probe()
            await asyncio.sleep(max(self._rules.interval_seconds - (loop.time() - began), 0.0))

    async def probe(self) -> None:
        why = await self._ask()
        if self._hysteresis.result(why is None):
            self._on_change(self._upstream.name, self._hysteresis.healthy, why or "probe passed")

    async def _ask(self) -> str | None:
        """None when the probe passed, else why it did not."""
        headers = [(b"accept", b"*/*")]
        credential = self._upstream.address.credential
        if credential is not None:
            headers.append((b"authorization", credential))
        try:
            response = await self._upstream.transport.send(
                b"GET", self._rules.path.encode(), headers, timeouts=self._timeouts
            )
            await response.read_all(_BODY_BYTES_MAX)
        except UpstreamError as error:
            return error.message
        return None if 200 <= response.status < 300 else f"probe of {self._rules.path} got {response.status}"
