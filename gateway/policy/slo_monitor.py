"""How well the latency promises are kept, per class.

Window: the last `window_requests` finished requests of the class, none older than `window_seconds`. Kept
in two views: from arrival (what the user saw) and from dispatch (what the engine did); and of two wholes:
*admitted* (those that got a first token or ran to an end at the engine) and *offered* (also those told no
or let down). A non-streamed answer has neither TTFT nor TPOT and does not count; neither do endings that
are the caller's own, nor a client that left before the promise was broken.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import CALLERS_OWN, Outcome
from gateway.policy.parameters import ClassParameters, SloTargets, SloWindow
from gateway.policy.request import Priority

VIEWS = ("arrival", "dispatch")
WHOLES = ("admitted", "offered")
SLOS = ("ttft", "tpot", "all")

_CLIENT_LEFT = frozenset({Outcome.CLIENT_GONE_QUEUED, Outcome.CLIENT_GONE_STREAMING, Outcome.CLIENT_STALLED})


class PromisesKept(NamedTuple):
    """Of each view whether each promise to a request was kept; None = it does not apply to it."""

    arrival_ttft: bool | None
    arrival_tpot: bool | None
    arrival_all: bool | None
    dispatch_ttft: bool | None
    dispatch_tpot: bool | None
    dispatch_all: bool | None


_PLACES = {(view, slo): PromisesKept._fields.index(f"{view}_{slo}") for view in VIEWS for slo in SLOS}


class Sample(NamedTuple):
    at: int
    admitted: bool
    met: PromisesKept


class _Window:
    """The samples of one class, and how many there are of each kind: mostly all are of one or two."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()
        self.kinds: Counter[tuple[bool, PromisesKept]] = Counter()

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.kinds[sample.admitted, sample.met] += 1

    def drop_oldest(self) -> None:
        oldest = self.samples.popleft()
        kind = oldest.admitted, oldest.met
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]


class SloMonitor:
    def __init__(self, classes: Mapping[Priority, ClassParameters], window: SloWindow) -> None:
        self._windows: dict[Priority, _Window] = {}
        self.reconfigure(classes, window)

    def reconfigure(self, classes: Mapping[Priority, ClassParameters], window: SloWindow) -> None:
        """Other promises: what was judged by the old ones stays so."""
        self._targets = {p: c.slo for p, c in classes.items() if c.slo is not None}
        self._limits = window
        self._windows = {p: self._windows.get(p) or _Window() for p in self._targets}

    def record(self, event: RequestEnded) -> Sample | None:
        """The sample that it makes, None for one that does not count."""
        targets = self._targets.get(event.priority)
        met = None if targets is None else judge(event, targets)
        if met is None:
            return None
        sample = Sample(event.ended_at, event.queue_wait_ns is not None, met)
        window = self._windows[event.priority]
        window.add(sample)
        while len(window.samples) > self._limits.window_requests:
            window.drop_oldest()
        return sample

    def attainment(self, priority: Priority, slo: str, view: str, of: str, now: int) -> float | None:
        """Share of kept promises in the window, None where there is no sample."""
        kept, counted = self.counts(priority, slo, view, of, now)
        return kept / counted if counted else None

    def counts(self, priority: Priority, slo: str, view: str, of: str, now: int) -> tuple[int, int]:
        """In the window: promises kept, and promises made."""
        window = self._windows.get(priority)
        if window is None:
            return 0, 0
        while window.samples and window.samples[0].at < now - self._limits.window_ns:
            window.drop_oldest()
        kept = counted = 0
        place, with_refused = _PLACES[view, slo], of == "offered"
        for (admitted, met), number in window.kinds.items():
            verdict = met[place]
            if verdict is not None and (admitted or with_refused):
                counted += number
                kept += number * verdict
        return kept, counted


def judge(event: RequestEnded, targets: SloTargets) -> PromisesKept | None:
    """None for a request that does not count, whatever it was promised."""
    outcome = event.outcome
    if not event.streaming or outcome in CALLERS_OWN or event.by_tenant_limit:
        return None
    let_down = outcome is not Outcome.COMPLETED
    if outcome in _CLIENT_LEFT:
        waited = event.ended_at - event.arrived_at
        broken = event.ttft_ns is None and targets.ttft_ns is not None and waited > targets.ttft_ns
        if event.ttft_ns is None and not broken:
            return None
        let_down = broken  # one that got its tokens and left is judged by what it got
    seen = _verdict(event.ttft_ns, targets.ttft_ns, let_down)
    served = _verdict(event.upstream_ttft_ns, targets.ttft_ns, let_down)
    tpot = _verdict(event.tpot_ns, targets.tpot_ns, let_down)
    gap = _verdict(event.max_gap_ns, targets.max_gap_ns, let_down)
    return PromisesKept(seen, tpot, _all(seen, tpot, gap), served, tpot, _all(served, tpot, gap))


def _verdict(measured: int | None, target: int | None, let_down: bool) -> bool | None:
    """None where nothing is promised, or nothing could be measured of one that was served."""
    if target is None or (measured is None and not let_down):
        return None
    return not let_down and measured is not None and measured <= target


def _all(ttft: bool | None, tpot: bool | None, gap: bool | None) -> bool | None:
    return None if ttft is tpot is gap is None else False not in (ttft, tpot, gap)
