"""The one place where the parts meet: settings → policy, engines, edge, listeners."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.api.access import ANYBODY, Access
from gateway.api.edge import Edge
from gateway.api.endpoints import with_extra_paths
from gateway.api.errors import status_of
from gateway.api.exchange import Interrupt
from gateway.api.prompt_reader import PromptReader
from gateway.api.request_body import BodyLimits
from gateway.api.tokenizer_files import TokenizerFile
from gateway.config_reading import ConfigError
from gateway.keys import KeyEntry, KeyRing
from gateway.mock_backend.child import MockGpus
from gateway.policy.admission import Admission
from gateway.policy.clock import Clock, to_nanoseconds
from gateway.policy.engine_load import EngineLoad
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES
from gateway.policy_parameters import classification_rules, is_observed, policy_parameters
from gateway.runtime.admission_gate import AdmissionGate
from gateway.runtime.system_clock import SystemClock
from gateway.settings import Settings
from gateway.telemetry.decision_log import Configuration, DecisionLogFile
from gateway.telemetry.exposition import new_registry
from gateway.telemetry.fanout import Observers
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from gateway.upstream.circuit_breaker import Admittance, BreakerRules
from gateway.upstream.client import Upstream, UpstreamAddress
from gateway.upstream.health import HealthProbe, ProbeRules, UpstreamHealth
from gateway.upstream.load_poller import LoadPoller, LoadRules
from gateway.upstream.retry_budget import RetryBudget
from gateway.upstream.transport import TransportTimeouts

_log = structlog.get_logger("gateway")

_LIMITS_OF_CLASSES = ("max_queued_requests", "max_queued_bytes")
_LIMITS_OF_KEYS = ("tokens_per_minute", "requests_per_minute", "max_in_flight")
_LIMITS_OF_UPSTREAMS = ("max_in_flight", "max_in_flight_tokens")

_STALL_CHECKS = 4
"""A reader is found stalled within a quarter of `write_idle_seconds` after that time."""


class Gateway:
    """A whole gateway, without its sockets. `await start()`, serve `edge`, then `drain` and `stop`."""

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing | None = None,
        *,
        tokenizers: Mapping[str, TokenizerFile] | None = None,
        mock_gpus: MockGpus | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.settings = settings
        self.registry = registry or new_registry()
        self._keys = keys
        self._tokenizers = tokenizers or {}
        self._clock = clock or SystemClock()
        self._random = random
        self._mock_gpus = mock_gpus
        self._tasks: list[asyncio.Task[None]] = []
        self._upstreams: dict[str, Upstream] = {}
        self._health: dict[str, UpstreamHealth] = {}
        self._decision_log: DecisionLogFile | None = None

    async def start(self) -> Edge:
        settings = self.settings
        await self._start_upstreams()
        self.edge = self._build_edge()
        for upstream_settings in settings.upstreams:
            health = upstream_settings.health
            rules = ProbeRules(health.path, health.interval_seconds, health.fail_after, health.pass_after)
            name = upstream_settings.name
            is_heard = partial(self.edge.is_heard, name)
            probe = HealthProbe(
                self._upstreams[name], rules, self._health[name].probed, self._clock, is_heard
            )
            self._tasks.append(asyncio.create_task(probe.run()))
            load = upstream_settings.load
            poller = LoadPoller(
                self._upstreams[upstream_settings.name],
                LoadRules(load.path, load.interval_seconds),
                self._load_told,
                self._load_readable,
            )
            self._tasks.append(asyncio.create_task(poller.run()))
        self._tasks.append(asyncio.create_task(self._drop_stalled_readers()))
        law = settings.controller
        if law.law != law.law_in_force:
            _log.warning("this control law is not in this version", law=law.law, in_force=law.law_in_force)
        observed = [p.name for p in PRIORITIES if is_observed(settings, p)]
        if observed:
            _log.warning("observe mode: decisions are recorded, nothing is enforced", classes=observed)
        for name in limits_of_zero(settings, self._keys or ()):
            _log.warning("this limit is 0: nothing passes", setting=name)
        if self._keys is None:
            _log.warning("open gateway: no keys_file, so anybody may claim any class")
        return self.edge

    async def drain(self) -> None:
        """Refuse what waits and what comes; let streams end until `drain_seconds`, then break them off."""
        self.edge.gate.drain()
        running = [exchange.task for exchange in self.edge.active if exchange.task is not None]
        try:
            if running:
                await asyncio.wait(running, timeout=self.settings.server.drain_seconds)
        finally:  # cancelled means: at once
            for exchange in list(self.edge.active):
                exchange.interrupt(Interrupt.SHUTDOWN)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for health in self._health.values():
            health.close()
        self.edge.gate.close()
        self.edge.prompt_reader.close()
        for upstream in self._upstreams.values():
            await upstream.aclose()
        if self._mock_gpus is not None:
            await self._mock_gpus.stop()
        if self._decision_log is not None:
            self._decision_log.close()

    # ------------------------------------------------------------------ inside

    async def _start_upstreams(self) -> None:
        timeouts = self.settings.upstream_timeouts
        transport_timeouts = TransportTimeouts(
            timeouts.connect_seconds, timeouts.first_byte_seconds, timeouts.idle_seconds
        )
        rules = self.settings.circuit_breaker
        breaker = BreakerRules(rules.failures, to_nanoseconds(rules.open_seconds))
        if self._mock_gpus is None:
            self._mock_gpus = MockGpus({upstream.name: upstream.url for upstream in self.settings.upstreams})
        for upstream in self.settings.upstreams:
            url = await self._mock_gpus.url(upstream.name) or upstream.url
            key = upstream.api_key
            address = UpstreamAddress(
                name=upstream.name,
                url=url,
                models=tuple(upstream.models),
                credential=None if key is None else b"Bearer " + key.get_secret_value().encode(),
                engine_priority=upstream.engine_priority,
            )
            self._upstreams[upstream.name] = Upstream(address, transport_timeouts)
            self._health[upstream.name] = UpstreamHealth(
                upstream.name, breaker, self._clock, self._admittance_changed
            )

    def _build_edge(self) -> Edge:
        settings = self.settings
        parameters = policy_parameters(settings, self._keys or ())
        request_log = RequestLog(status_of)
        metrics = self._metrics(parameters)
        self._decision_log = self._open_decision_log(parameters)
        listeners = (metrics, request_log, self._decision_log)
        observers = Observers(*(listener for listener in listeners if listener is not None))
        admission = Admission(parameters, self._clock, observers)
        metrics.watch(admission)
        return Edge(
            clock=self._clock,
            gate=AdmissionGate(admission, self._clock),
            upstreams=self._upstreams,
            health=self._health,
            retries=RetryBudget(settings.upstream_retry_budget),
            access=Access(self._keys),
            rules=classification_rules(settings),
            priority_headers=frozenset(name.lower().encode() for name in settings.classification.header),
            prompt_reader=PromptReader(admission, self._tokenizers),
            body_limits=BodyLimits(settings.server.max_body_bytes, settings.server.body_read_seconds),
            metrics=metrics,
            request_log=request_log,
            observer=observers,
            random=self._random,
            probe_seconds=min(upstream.health.interval_seconds for upstream in settings.upstreams),
            endpoints=with_extra_paths(settings.paths or ()),
        )

    def _open_decision_log(self, parameters: PolicyParameters) -> DecisionLogFile | None:
        settings = self.settings
        if settings.decision_log is None:
            return None
        try:
            return DecisionLogFile(
                settings.decision_log,
                max_bytes=settings.decision_log_max_bytes,
                files=settings.decision_log_files,
                configuration=Configuration(parameters, self._clock, __version__),
            )
        except OSError as error:
            says = f"decision_log: {settings.decision_log} cannot be written: {error.strerror}"
            raise ConfigError([says]) from error

    def _metrics(self, parameters: PolicyParameters) -> Metrics:
        timeouts = self.settings.upstream_timeouts
        return Metrics(
            None,
            self.registry,
            parameters=parameters,
            clock=self._clock,
            version=__version__,
            first_byte_seconds=timeouts.first_byte_seconds,
            idle_seconds=timeouts.idle_seconds,
            max_label_values=self.settings.metrics.max_label_values,
            known_tenants=[ANYBODY.tenant, *(entry.tenant for entry in self._keys or ())],
        )

    def _admittance_changed(self, name: str, admits: Admittance, why: str) -> None:
        if admits is Admittance.TRIAL:
            _log.info("upstream is back", upstream=name, reason=f"{why}; the next request is a trial")
            self.edge.gate.set_upstream_trial(name)
        elif admits is Admittance.ALL:
            _log.info("upstream serves again", upstream=name, reason=why)
            self.edge.gate.set_upstream_health(name, True)
        else:
            _log.warning("upstream is down", upstream=name, reason=why)
            self.edge.gate.set_upstream_health(name, False)

    def _load_told(self, name: str, load: EngineLoad) -> None:
        self.edge.metrics.load_page_read(name)
        self.edge.gate.engine_load_told(name, load)

    def _load_readable(self, name: str, readable: bool, why: str) -> None:
        if readable:
            _log.info("the engine's load is known", upstream=name)
        else:
            _log.warning("the engine's load is not known: own counts only", upstream=name, reason=why)

    async def _drop_stalled_readers(self) -> None:
        limit = self.settings.server.write_idle_seconds
        while True:
            await asyncio.sleep(limit / _STALL_CHECKS)
            oldest = self._clock.now() - to_nanoseconds(limit)
            for exchange in list(self.edge.active):
                since = exchange.reply.writing_since
                if since is not None and since <= oldest:
                    exchange.interrupt(Interrupt.CLIENT_STALLED)


def limits_of_zero(settings: Settings, keys: Iterable[KeyEntry]) -> list[str]:
    """The limits that are set to 0, by name: null is no limit, 0 lets nothing pass; that may be a slip."""
    found = []
    for upstream in settings.upstreams:
        found += [f"upstreams.{upstream.name}.{n}" for n in _LIMITS_OF_UPSTREAMS if getattr(upstream, n) == 0]
    for p in PRIORITIES:
        limits = settings.classes[p.name]
        found += [f"classes.{p.name}.{n}" for n in _LIMITS_OF_CLASSES if getattr(limits, n) == 0]
    for key in keys:
        found += [f"keys.{key.id}.{n}" for n in _LIMITS_OF_KEYS if getattr(key, n) == 0]
    return found + ["capacity.max_request_tokens"] * (settings.capacity.max_request_tokens == 0)
