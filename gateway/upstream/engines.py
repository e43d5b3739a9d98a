"""The engines in use: of each its client, what it may get, and the two tasks that watch it.

An engine is known by its name and the address that is configured for it: the same name at another address is
another engine. When the configuration changes, one that stays keeps its state, connections and probes; one
that goes is no longer watched, and serves what it has begun.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gateway.policy.clock import Clock
from gateway.policy.engine_load import EngineLoad
from gateway.upstream.circuit_breaker import Admittance, BreakerRules
from gateway.upstream.client import Upstream, UpstreamAddress
from gateway.upstream.health import HealthProbe, ProbeRules, UpstreamHealth
from gateway.upstream.load_poller import LoadPoller, LoadRules
from gateway.upstream.transport import TransportTimeouts

Key = tuple[str, str]
"""Name and configured address."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    address: UpstreamAddress
    """Where it really is."""
    configured_url: str
    """What the configuration says, which may only stand for that (`mock://…`)."""
    timeouts: TransportTimeouts
    probe: ProbeRules
    load: LoadRules
    breaker: BreakerRules

    @property
    def key(self) -> Key:
        return self.address.name, self.configured_url


class Listener(Protocol):
    """Hears of the engines that are in use, by name."""

    def admittance_changed(self, name: str, admits: Admittance, why: str) -> None: ...
    def load_told(self, name: str, load: EngineLoad) -> None: ...
    def load_readable(self, name: str, readable: bool, why: str) -> None: ...
    def is_trial_taken(self, name: str) -> bool:
        """Whether the one request that it may get on trial is under way."""
        ...

    def is_heard(self, engine: Key, since: int) -> bool:
        """Whether anything of an answer has come from there since then (ns)."""
        ...


class Engine:
    def __init__(
        self, settings: EngineSettings, upstream: Upstream, listener: Listener, clock: Clock
    ) -> None:
        self.settings = settings
        self.upstream = upstream
        self._listener = listener
        self._in_use = True
        name = upstream.name
        is_trial_taken = partial(listener.is_trial_taken, name)
        is_heard = partial(listener.is_heard, settings.key)
        self.health = health = UpstreamHealth(
            name, settings.breaker, clock, self._admittance_changed, is_trial_taken
        )
        self._probe = HealthProbe(
            upstream, settings.probe, health.probed, health.probe_passed, clock, is_heard
        )
        self._poller = LoadPoller(upstream, settings.load, listener.load_told, listener.load_readable)
        self._tasks = [asyncio.create_task(self._probe.run()), asyncio.create_task(self._poller.run())]

    @property
    def name(self) -> str:
        return self.upstream.name

    def take(self, settings: EngineSettings, upstream: Upstream) -> None:
        """Other settings from now on; what is known of the engine stays known."""
        self.settings = settings
        self.upstream = upstream
        self.health.reconfigure(settings.breaker)
        self._probe.reconfigure(upstream, settings.probe)
        self._poller.reconfigure(upstream, settings.load)

    def leave(self) -> None:
        """It is not in use any more: watched no longer, and what its last requests show is nobody's news."""
        self._in_use = False
        for task in self._tasks:
            task.cancel()
        self.health.close()

    async def aclose(self) -> None:
        self.leave()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.upstream.aclose()

    def _admittance_changed(self, name: str, admits: Admittance, why: str) -> None:
        if self._in_use:
            self._listener.admittance_changed(name, admits, why)


class Engines:
    def __init__(self, listener: Listener, clock: Clock) -> None:
        self._listener = listener
        self._clock = clock
        self._in_use: dict[Key, Engine] = {}
        self._leaving: dict[Key, Engine] = {}
        self._replaced: list[Upstream] = []  # clients of engines that have got another one

    def __iter__(self) -> Iterator[Engine]:
        """Those in use, in the order of the configuration."""
        return iter(self._in_use.values())

    @property
    def keys(self) -> set[Key]:
        """Of all that are not closed."""
        return {*self._in_use, *self._leaving}

    def of(self, key: Key) -> Engine:
        """Also of one that serves what it has begun."""
        return self._in_use.get(key) or self._leaving[key]

    # ------------------------------------------------------------------ another configuration

    def clients_for(self, settings: Sequence[EngineSettings]) -> Mapping[Key, Upstream]:
        """A client for each engine, those at hand where nothing about them changes. Raises ValueError and
        OSError for what cannot be connected to (a bad address, certificates that cannot be read)."""
        return {each.key: self._client_for(each) for each in settings}

    def _client_for(self, settings: EngineSettings) -> Upstream:
        present = self._in_use.get(settings.key)
        if present is not None and _connects_alike(present.settings, settings):
            return present.upstream
        return Upstream(settings.address, settings.timeouts)

    def take(self, settings: Sequence[EngineSettings], clients: Mapping[Key, Upstream]) -> None:
        """These are in use from now on, with the clients that `clients_for` has made for them."""
        former, self._in_use = self._in_use, {}
        for each in settings:
            client, engine = clients[each.key], former.pop(each.key, None)
            if engine is None:
                engine = Engine(each, client, self._listener, self._clock)
            else:
                if engine.upstream is not client:
                    self._replaced.append(engine.upstream)
                engine.take(each, client)
            self._in_use[each.key] = engine
        for key, engine in former.items():
            engine.leave()
            if key in self._leaving:  # it has left before, and come back meanwhile
                self._replaced.append(self._leaving[key].upstream)
            self._leaving[key] = engine

    @property
    def anybody_leaves(self) -> bool:
        return bool(self._leaving or self._replaced)

    async def let_go(self, is_needed: Callable[[Key], bool]) -> None:
        """Close what nothing goes through any more, and that is not needed."""
        gone = [
            key
            for key, engine in self._leaving.items()
            if not engine.upstream.transport.in_use and not is_needed(key)
        ]
        idle = [client for client in self._replaced if not client.transport.in_use]
        self._replaced = [client for client in self._replaced if client not in idle]
        await asyncio.gather(
            *(self._leaving.pop(key).aclose() for key in gone), *(client.aclose() for client in idle)
        )

    async def aclose(self) -> None:
        engines = [*self._in_use.values(), *self._leaving.values()]
        await asyncio.gather(
            *(engine.aclose() for engine in engines), *(client.aclose() for client in self._replaced)
        )


def _connects_alike(one: EngineSettings, other: EngineSettings) -> bool:
    """The file of certificates may hold others now, so a client that has one is always made anew."""
    alike = (one.address, one.timeouts) == (other.address, other.timeouts)
    return alike and other.address.tls_ca_file is None
