"""Is an engine alive, and does it serve? Two signs, brought together in what it may get.

Life: probed at a steady pace, with hysteresis so that one late answer changes nothing. An upstream counts as
alive until its first failed probe. Once it has passed a probe it takes `fail_after` failures in a row to
count it out, and `pass_after` passes in a row to let it in again. Before that a no counts at once (nobody
listens, or the engine is not ready), but an answer that is only late does not: at the start it may be the
gateway's own machine that is slow. A late probe says nothing at all against an engine whose answers come
meanwhile: it is busy with them.

Service: how the requests end that it gets; see `circuit_breaker`. While one of them is its trial, probes that
pass let others in beside it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.policy.clock import NANOSECONDS_PER_SECOND, NEVER, Clock, to_seconds
from gateway.upstream.circuit_breaker import Admittance, BreakerRules, CircuitBreaker
from gateway.upstream.client import Upstream
from gateway.upstream.errors import ConnectFailed, FirstByteTimeout, IdleTimeout, UpstreamError

PROBE_SECONDS_MAX = 2.0
_BODY_BYTES_MAX = 65536
_TIMER_SLACK_NS = 1_000_000
"""uvloop may call a timer half a millisecond early."""


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

    def reconfigure(self, rules: ProbeRules) -> None:
        self._rules = rules

    def result(self, passed: bool, late: bool = False) -> bool:
        """Take in one result, a failure perhaps only `late`; answers whether `healthy` changed."""
        if passed == self.healthy:
            self._in_a_row = 0
            self._proven = self._proven or passed
            return False
        self._in_a_row += 1
        if self._in_a_row < self._needed(passed, late):
            return False
        self.healthy = passed
        self._in_a_row = 0
        self._proven = True
        return True

    def _needed(self, passed: bool, late: bool) -> int:
        if passed:
            return self._rules.pass_after
        return self._rules.fail_after if self._proven or late else 1


class UpstreamHealth:
    """What one upstream may get, by all that is known of it.

    `on_change(name, admits, why)` is called at every change, and with TRIAL again for each further request
    that may be its trial; `why` is a phrase for the log. `is_trial_taken()` says whether the request that may
    be the trial is under way. When requests were sent (`sent_at`) is told in nanoseconds of the clock.
    """

    def __init__(
        self,
        name: str,
        rules: BreakerRules,
        clock: Clock,
        on_change: Callable[[str, Admittance, str], None],
        is_trial_taken: Callable[[], bool],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._name = name
        self._rules = rules
        self._clock = clock
        self._on_change = on_change
        self._is_trial_taken = is_trial_taken
        self._loop = loop or asyncio.get_running_loop()
        self._breaker = CircuitBreaker(rules)
        self._timer: asyncio.TimerHandle | None = None
        self.served_at = 0
        """When a request was last answered."""

    @property
    def admits(self) -> Admittance:
        return self._breaker.admits

    def reconfigure(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._breaker.reconfigure(rules)

    def request_succeeded(self, sent_at: int) -> None:
        self.served_at = self._clock.now()
        if self._breaker.succeeded(sent_at):
            self._changed("its trial request was answered")

    def request_began(self, sent_at: int) -> None:
        """Its first token has come."""
        if self._breaker.began(sent_at):
            self._changed("its trial request is being answered")

    def request_failed(self, sent_at: int, why: str) -> None:
        on_trial = self.admits is Admittance.TRIAL
        if self._breaker.failed(sent_at, self._clock.now()):
            which = "its trial request" if on_trial else "requests in a row"
            self._changed(f"{which} failed: {why}")

    def probed(self, alive: bool, why: str) -> None:
        """The probes have changed their mind."""
        if self._breaker.probed(alive, self._clock.now()):
            self._changed(why)

    def probe_passed(self) -> None:
        """One more, which changed no mind."""
        on_trial = self.admits is Admittance.TRIAL
        if on_trial and self._is_trial_taken() and self._breaker.add(self._clock.now()):
            self._changed("probe passed while its trial request runs")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _changed(self, why: str) -> None:
        self._set_timer()
        self._on_change(self._name, self.admits, why)

    def _set_timer(self) -> None:
        self.close()
        deadline = self._breaker.next_deadline()
        if deadline < NEVER:
            delay_ns = max(deadline - self._clock.now(), 0) + _TIMER_SLACK_NS
            self._timer = self._loop.call_later(delay_ns / NANOSECONDS_PER_SECOND, self._wake)

    def _wake(self) -> None:
        if self._breaker.advance(self._clock.now()):
            self._changed(f"{to_seconds(self._rules.open_ns):g} s are over")
        else:
            self._set_timer()


@dataclass(frozen=True, slots=True)
class _Missed:
    """A probe that did not pass; `late` when nothing is known but that no answer came in time."""

    why: str
    late: bool = False


class HealthProbe:
    """Probes one upstream for as long as `run` is awaited.

    `on_change(healthy, why)` is called at every change; `why` is a phrase for the log. `on_passed()` is
    called for each probe that passes and changes nothing. `is_heard(since)` says whether anything of an
    answer has come from the upstream since then (ns).
    """

    def __init__(
        self,
        upstream: Upstream,
        rules: ProbeRules,
        on_change: Callable[[bool, str], None],
        on_passed: Callable[[], None],
        clock: Clock,
        is_heard: Callable[[int], bool],
    ) -> None:
        self._upstream = upstream
        self._rules = rules
        self._on_change = on_change
        self._on_passed = on_passed
        self._clock = clock
        self._is_heard = is_heard
        self._hysteresis = Hysteresis(rules)

    @property
    def healthy(self) -> bool:
        return self._hysteresis.healthy

    def reconfigure(self, upstream: Upstream, rules: ProbeRules) -> None:
        """From the next probe on. What the last ones have shown stays known."""
        self._upstream = upstream
        self._rules = rules
        self._hysteresis.reconfigure(rules)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self.probe()
            await asyncio.sleep(max(self._rules.interval_seconds - (loop.time() - began), 0.0))

    async def probe(self) -> None:
        began = self._clock.now()
        missed = await self._ask()
        late = missed is not None and missed.late
        excused = late and self.healthy and self._is_heard(began)
        if self._hysteresis.result(missed is None or excused, late):
            self._on_change(self.healthy, "probe passed" if missed is None else missed.why)
        elif missed is None and self.healthy:
            self._on_passed()

    async def _ask(self) -> _Missed | None:
        seconds = min(PROBE_SECONDS_MAX, max(self._rules.interval_seconds, 0.1))
        try:
            async with asyncio.timeout(seconds):  # for all of it: a body may drip
                response = await self._upstream.get(self._rules.path, b"*/*")
                await response.read_all(_BODY_BYTES_MAX)
        except TimeoutError:
            return _Missed(f"no whole answer from {self._rules.path} within {seconds:g} s", late=True)
        except (FirstByteTimeout, IdleTimeout) as error:  # where the upstream's own limits are shorter
            return _Missed(error.message, late=True)
        except ConnectFailed as error:
            return _Missed(error.message, late=error.timed_out)
        except UpstreamError as error:
            return _Missed(error.message)
        passed = 200 <= response.status < 300
        return None if passed else _Missed(f"probe of {self._rules.path} got {response.status}")
