"""The one place where the parts meet: configuration → policy, engines, edge, listeners."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry

from gateway import __version__
from gateway.api.access import ANYBODY, Access
from gateway.api.admin_settings import changed_settings
from gateway.api.advice import advice_on, warn
from gateway.api.audit import SIGNAL, AuditTrail, Operator
from gateway.api.configuration import Configuration, Difference, difference
from gateway.api.edge import Edge
from gateway.api.endpoints import with_extra_paths
from gateway.api.engine_settings import engine_settings
from gateway.api.errors import status_of
from gateway.api.exchange import Interrupt
from gateway.api.preparation import Prepared, prepare
from gateway.api.prompt_reader import PromptReader
from gateway.api.request_body import BodyLimits
from gateway.api.request_facts import door_headers
from gateway.api.upkeep import now_and_then
from gateway.config_reading import ConfigError
from gateway.keys import KeyRing
from gateway.mock_backend.child import MockGpuError, MockGpus
from gateway.policy.admission import Admission
from gateway.policy.clock import Clock, to_nanoseconds
from gateway.policy.engine_load import EngineLoad
from gateway.policy.parameters import PolicyParameters
from gateway.policy_parameters import classification_rules, policy_parameters
from gateway.runtime.admission_gate import AdmissionGate
from gateway.runtime.system_clock import SystemClock
from gateway.settings import Settings
from gateway.telemetry.change_log import ChangeLog
from gateway.telemetry.decision_log import Configuration as LoggedConfiguration
from gateway.telemetry.decision_log import DecisionLogFile
from gateway.telemetry.exposition import new_registry
from gateway.telemetry.fanout import Observers
from gateway.telemetry.history import INTERVAL_SECONDS, History
from gateway.telemetry.log_setup import configure_logging
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recent import Recent
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.tracing import Tracing, open_exporter
from gateway.telemetry.tracing_context import TRACE_HEADERS
from gateway.upstream.circuit_breaker import Admittance
from gateway.upstream.client import Upstream
from gateway.upstream.engines import Engines, EngineSettings, Key
from gateway.upstream.retry_budget import RetryBudget

if TYPE_CHECKING:
    from gateway.api.fleet_member import FleetMember

_log = structlog.get_logger("gateway")

_STALL_CHECKS = 4
"""A reader is found stalled within a quarter of `write_idle_seconds` after that time."""
_LETTING_GO_SECONDS = 0.5
"""Between looks whether engines that have left are still at work."""


class Gateway:
    """A whole gateway, without its sockets. `await start()`, serve `edge`, then `drain` and `stop`.

    `read` reads the configuration again, for `reload`.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        read: Callable[[], Configuration] | None = None,
        mock_gpus: MockGpus | None = None,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.configuration = configuration
        self.registry = registry or new_registry()
        self._read = read
        self._as_read = configuration
        """What was last read; the one in force may differ by what operators have changed since."""
        self._clock = clock or SystemClock()
        self.started_at = self._clock.now()
        self.trail = AuditTrail(self._clock)
        self.recent = Recent()
        self._random = random
        self._mock_gpus = mock_gpus
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading = asyncio.Lock()
        self._decision_log: DecisionLogFile | None = None
        self._tracing: Tracing | None = None
        self.fleet: FleetMember | None = None

    @property
    def settings(self) -> Settings:
        return self.configuration.settings

    @property
    def _keys(self) -> KeyRing | tuple[()]:
        return self.configuration.keys or ()

    @property
    def keys(self) -> KeyRing | None:
        return self.configuration.keys

    def set_at_run_time(self) -> Difference:
        """The settings that are not as they were last read."""
        return difference(self._as_read, self.configuration)

    async def start(self) -> Edge:
        """Raises ConfigError, and MockGpuError for an embedded engine that does not come up."""
        async with self._reloading:  # a reload that is asked for meanwhile comes after it
            return await self._start()

    async def _start(self) -> Edge:
        if self._mock_gpus is None:
            self._mock_gpus = MockGpus({upstream.name: upstream.url for upstream in self.settings.upstreams})
        engines = Engines(self, self._clock)
        wanted = await engine_settings(self.settings, self._mock_gpus)
        self.edge = self._build_edge(engines)
        engines.take(wanted, _clients(engines, wanted))
        self.history = History(self.edge.admission, self.recent)
        for work in (
            now_and_then("stalled readers", self._drop_stalled_readers, self._stall_pause_seconds),
            now_and_then("history", self._keep_history, lambda: INTERVAL_SECONDS),
        ):
            self._tasks.append(asyncio.create_task(work))
        warn(advice_on(self.configuration))
        await self._join_fleet()
        return self.edge

    async def _join_fleet(self) -> None:
        url = self.settings.store_url
        if url is None:
            return
        from gateway.api.fleet_member import FleetMember  # with redis-py, which nobody else needs

        self.fleet = FleetMember(url, self.settings.fleet, self.edge.gate, self._clock)
        self.fleet.on_call = self.edge.metrics.watch_fleet(self.fleet)
        await self.fleet.join()

    async def reload(self, by: Operator = SIGNAL) -> Difference:
        """Read the configuration again and take it over, all or nothing: nothing that waits or runs is
        disturbed. What operators have set since it was last read is overridden. Raises ConfigError with what
        is wrong, and nothing has changed then."""
        async with self._reloading:
            try:
                found = await self._reload()
            except ConfigError as error:
                self.edge.metrics.config_reloaded("failed")
                _log.error(
                    "the configuration was not reloaded; the old one stays in force", reason=str(error)
                )
                self.trail.record("reload", by, reason=str(error))
                raise
        self.edge.metrics.config_reloaded("ok")
        _log.info("configuration reloaded", changed=list(found.changed))
        if found.needs_restart:
            _log.warning("these settings only change at a restart", settings=list(found.needs_restart))
        if found.overrides:
            _log.warning("the reload overrides what was set at run time", settings=list(found.overrides))
        self.trail.record("reload", by, found.values)
        return found

    async def change_settings(self, change: Mapping[str, Any], by: Operator) -> Difference:
        """Lay these settings over those in force, all or nothing as in `reload`, until the next one. Raises
        ConfigError."""
        async with self._reloading:
            try:
                self._check_may_change()
                settings = await asyncio.to_thread(changed_settings, self.settings, change)
                found = await self._take_over(replace(self.configuration, settings=settings))
            except ConfigError as error:
                self.trail.record("settings", by, reason=str(error))
                raise
        self.trail.record("settings", by, found.values)
        return found

    def take_no_more(self, by: Operator) -> None:
        """As at a SIGTERM what waits and what comes is refused, from now on, and streams go on; but the
        process stays, and none is broken off."""
        if not self.edge.admission.draining:
            self.trail.record("drain", by)
            self._refuse_all()

    async def drain(self) -> None:
        """Refuse what waits and what comes; let streams end until `drain_seconds`, then break them off."""
        self._refuse_all()
        running = [exchange.task for exchange in self.edge.active if exchange.task is not None]
        try:
            if running:
                await asyncio.wait(running, timeout=self.settings.server.drain_seconds)
        finally:  # cancelled means: at once
            for exchange in list(self.edge.active):
                exchange.interrupt(Interrupt.SHUTDOWN)

    def _refuse_all(self) -> None:
        self.edge.gate.drain()
        if self.fleet is not None:
            self.fleet.leave_off()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.fleet is not None:
            await self.fleet.leave()
        self.edge.gate.close()
        self.edge.prompt_reader.close()
        await self.edge.engines.aclose()
        if self._mock_gpus is not None:
            await self._mock_gpus.stop()
        if self._decision_log is not None:
            self._decision_log.close()
        if self._tracing is not None:
            await self._tracing.close()

    # ------------------------------------------------------------------ another configuration

    async def _reload(self) -> Difference:
        if self._read is None:
            raise ConfigError(["this gateway has no configuration that could be read again"])
        self._check_may_change()
        new = await asyncio.to_thread(self._read)
        set_at_run_time = set(self.set_at_run_time().changed)
        found = await self._take_over(new)
        self._as_read = self.configuration
        overrides = tuple(name for name in found.changed if name in set_at_run_time)
        return replace(found, overrides=overrides)

    def _check_may_change(self) -> None:
        if self.edge.admission.draining:
            raise ConfigError(["the gateway is shutting down"])

    async def _take_over(self, new: Configuration) -> Difference:
        """Everything that can fail comes first. Raises ConfigError, and nothing has changed then."""
        in_force = self.edge.admission.parameters
        ready = await asyncio.to_thread(prepare, self.configuration, new, in_force, self._clock)
        engines, mock_gpus = self.edge.engines, self._mock_gpus
        assert mock_gpus is not None
        try:
            wanted = await engine_settings(ready.configuration.settings, mock_gpus)
            clients = _clients(engines, wanted)
        except (MockGpuError, ConfigError) as error:
            await mock_gpus.stop_all_but(engines.keys)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError([f"upstreams: {error}"]) from error
        self._take(ready, wanted, clients)
        self._tasks = [task for task in self._tasks if not task.done()]
        if engines.anybody_leaves:
            self._tasks.append(asyncio.create_task(self._let_engines_go()))
        return ready.found

    def _take(self, ready: Prepared, wanted: list[EngineSettings], clients: Mapping[Key, Upstream]) -> None:
        """From one configuration to the other within one turn of the event loop."""
        new = ready.configuration
        old, self.configuration = self.configuration, new
        if old.settings.logging != new.settings.logging:
            configure_logging(new.settings.logging.level, new.settings.logging.format)
            self._request_log.take_logging()
            self._change_log.take_logging()
        edge, settings = self.edge, new.settings
        edge.metrics.know_tenants(ready.new_tenants)
        edge.retries.reconfigure(settings.upstream_retry_budget)
        edge.prompt_reader.tokenizers = new.tokenizers
        if ready.access is not None:
            edge.access = ready.access
        self._take_rules(edge)
        edge.gate.reconfigure(ready.parameters)
        edge.engines.take(wanted, clients)
        warn(ready.advice)

    def _take_rules(self, edge: Edge) -> None:
        """What the door goes by."""
        settings = self.settings
        edge.rules = classification_rules(settings)
        edge.priority_headers = frozenset(name.lower().encode() for name in settings.classification.header)
        edge.door_headers = door_headers(edge.priority_headers)
        if edge.tracing is not None:
            edge.door_headers |= TRACE_HEADERS
        edge.body_limits = BodyLimits(settings.server.max_body_bytes, settings.server.body_read_seconds)
        edge.probe_seconds = min(upstream.health.interval_seconds for upstream in settings.upstreams)
        edge.endpoints = with_extra_paths(settings.paths or ())

    async def _let_engines_go(self) -> None:
        """Close engines that are configured no longer as soon as what they had begun has ended."""
        engines, mock_gpus = self.edge.engines, self._mock_gpus
        assert mock_gpus is not None
        while engines.anybody_leaves:
            async with self._reloading:  # which may be starting some
                leaving = self.edge.admission.leaving
                at_work = {(slots.parameters.name, slots.parameters.address) for slots in leaving}
                await engines.let_go(at_work.__contains__)
                await mock_gpus.stop_all_but(engines.keys)
            await asyncio.sleep(_LETTING_GO_SECONDS)

    # ------------------------------------------------------------------ building

    def _build_edge(self, engines: Engines) -> Edge:
        settings = self.settings
        parameters = policy_parameters(settings, self._keys)
        request_log = self._request_log = RequestLog(status_of)
        change_log = self._change_log = ChangeLog()
        metrics = self._metrics(parameters)
        self._decision_log = self._open_decision_log(parameters)
        tracing = self._tracing = self._open_tracing()
        listeners = (metrics, request_log, change_log, self.recent, self._decision_log, tracing)
        observers = Observers(*(listener for listener in listeners if listener is not None))
        admission = Admission(parameters, self._clock, observers)
        metrics.watch(admission)
        edge = Edge(
            clock=self._clock,
            gate=AdmissionGate(admission, self._clock),
            engines=engines,
            retries=RetryBudget(settings.upstream_retry_budget),
            prompt_reader=PromptReader(admission, self.configuration.tokenizers),
            metrics=metrics,
            request_log=request_log,
            observer=observers,
            tracing=tracing,
            random=self._random,
        )
        edge.access = Access(self.configuration.keys)
        self._take_rules(edge)
        return edge

    def _open_decision_log(self, parameters: PolicyParameters) -> DecisionLogFile | None:
        settings = self.settings
        if settings.decision_log is None:
            return None
        try:
            return DecisionLogFile(
                settings.decision_log,
                max_bytes=settings.decision_log_max_bytes,
                files=settings.decision_log_files,
                configuration=LoggedConfiguration(parameters, self._clock, __version__),
            )
        except OSError as error:
            says = f"decision_log: {settings.decision_log} cannot be written: {error.strerror}"
            raise ConfigError([says]) from error

    def _open_tracing(self) -> Tracing | None:
        wanted = self.settings.tracing
        if wanted is None:
            return None
        headers = {name: value.get_secret_value() for name, value in wanted.headers.items()}
        exporter = open_exporter(wanted.endpoint, wanted.service_name, headers, __version__)
        return Tracing(exporter, wanted.sample_ratio, self._clock, status_of)

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
            known_tenants=[ANYBODY.tenant, *(entry.tenant for entry in self._keys)],
        )

    # ------------------------------------------------------------------ what the engines tell

    def admittance_changed(self, name: str, admits: Admittance, why: str) -> None:
        if admits is Admittance.TRIAL:
            _log.info("upstream is back", upstream=name, reason=f"{why}; the next request is a trial")
            self.edge.gate.set_upstream_trial(name)
        elif admits is Admittance.ALL:
            _log.info("upstream serves again", upstream=name, reason=why)
            self.edge.gate.set_upstream_health(name, True)
        else:
            _log.warning("upstream is down", upstream=name, reason=why)
            self.edge.gate.set_upstream_health(name, False)

    def load_told(self, name: str, load: EngineLoad) -> None:
        self.edge.metrics.load_page_read(name)
        self.edge.gate.engine_load_told(name, load)

    def load_readable(self, name: str, readable: bool, why: str) -> None:
        if readable:
            _log.info("the engine's load is known", upstream=name)
        else:
            _log.warning("the engine's load is not known: own counts only", upstream=name, reason=why)

    def is_trial_taken(self, name: str) -> bool:
        return not self.edge.admission.upstream(name).usable

    def is_heard(self, engine: Key, since: int) -> bool:
        return self.edge.is_heard(engine, since)

    # ------------------------------------------------------------------ now and then

    def _keep_history(self) -> None:
        self.history.take(self._clock.now())

    def _stall_pause_seconds(self) -> float:
        return self.settings.server.write_idle_seconds / _STALL_CHECKS

    def _drop_stalled_readers(self) -> None:
        oldest = self._clock.now() - to_nanoseconds(self.settings.server.write_idle_seconds)
        for exchange in list(self.edge.active):
            since = exchange.reply.writing_since
            if since is not None and since <= oldest:
                exchange.interrupt(Interrupt.CLIENT_STALLED)


def _clients(engines: Engines, wanted: list[EngineSettings]) -> Mapping[Key, Upstream]:
    """Raises ConfigError for an engine that cannot be connected to as it is configured."""
    try:
        return engines.clients_for(wanted)
    except (OSError, ValueError) as error:
        raise ConfigError([f"upstreams: {error}"]) from error
