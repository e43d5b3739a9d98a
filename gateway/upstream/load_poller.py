"""How full is an engine? Its metrics page is read at a steady pace, for as long as the gateway runs.

What cannot be read is not told: the policy then goes by its own counts once the last page is stale. An engine
that is down, or has no such page, is asked on: a refused connection or a 404 costs next to nothing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from gateway.policy.engine_load import EngineLoad
from gateway.upstream.client import Upstream
from gateway.upstream.engine_metrics import read_load
from gateway.upstream.errors import UpstreamError

PAGE_BYTES_MAX = 2 * 1024 * 1024
"""vLLM's page has 60 KB for each of its data-parallel engines. Reading one is a pause for all streams."""


@dataclass(frozen=True, slots=True)
class LoadRules:
    path: str = "/metrics"
    interval_seconds: float = 1.0
    page_seconds_max: float = 2.0
    """From asking to the last byte. A busy engine takes its time; what comes later than this is old news."""


class LoadPoller:
    """Reads one upstream's page for as long as `run` is awaited.

    `on_load(name, load)` is called for each page that says something. `on_change(name, readable, why)` is
    called after the first page and whenever pages begin or cease to be readable; `why` is a phrase for the
    log.
    """

    def __init__(
        self,
        upstream: Upstream,
        rules: LoadRules,
        on_load: Callable[[str, EngineLoad], None],
        on_change: Callable[[str, bool, str], None],
    ) -> None:
        self._upstream = upstream
        self._rules = rules
        self._on_load = on_load
        self._on_change = on_change
        self._readable: bool | None = None

    def reconfigure(self, upstream: Upstream, rules: LoadRules) -> None:
        """From the next reading on."""
        self._upstream = upstream
        self._rules = rules

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            await self.poll()
            due = next_due(due, self._rules.interval_seconds, loop.time())
            await asyncio.sleep(due - loop.time())

    async def poll(self) -> None:
        answer = await self._ask()
        readable = isinstance(answer, EngineLoad)
        if isinstance(answer, EngineLoad):
            self._on_load(self._upstream.name, answer)
        if readable != self._readable:
            self._readable = readable
            self._on_change(self._upstream.name, readable, "page read" if readable else str(answer))

    async def _ask(self) -> EngineLoad | str:
        """The load, or why it is not known."""
        path, seconds = self._rules.path, self._rules.page_seconds_max
        try:
            async with asyncio.timeout(seconds):
                response = await self._upstream.get(path, b"text/plain")
                page = await response.read_all(PAGE_BYTES_MAX)
        except UpstreamError as error:
            return error.message
        except TimeoutError:
            return f"no whole page from {path} within {seconds:g} s"
        if response.status != 200:
            return f"{path} got {response.status}"
        return read_load(page) or f"{path} has no metric of an engine that is known here"


def next_due(due: float, interval: float, now: float) -> float:
    """The next beat after `now`; beats that went by meanwhile are left out."""
    return due + interval * max(ceil((now - due) / interval), 1)
