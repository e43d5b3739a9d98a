"""How well the latency promises are kept, per class.

Window: the last `window_requests` finished requests of the class, none older than `window_seconds`. Kept
in two views: from arrival (what the user saw) and from dispatch (what the engine did); and of two wholes:
*admitted* (those that got a first token or ran to an end at the engine) and *offered* (also those told no
or let down). A non-streamed answer has neither TTFT nor TPOT and does not count; neither do endings that
are the caller's own, nor a client that left before the promise was broken.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.policy.events import RequestEnded
from gateway.policy.outcome import CALLERS_OWN, Outcome
from gateway.policy.parameters import ClassParameters, SloTargets, SloWindow
from gateway.policy.request import Priority

VIEWS = ("arrival", "dispatch")
WHOLES = ("admitted", "offered")
SLOS = ("ttft", "tpot", "all")
_OFFERED_ONLY = ("offered",)
_COUNTED = tuple((view, slo, of) for view in VIEWS for slo in SLOS for of in WHOLES)

_CLIENT_LEFT = frozenset({Outcome.CLIENT_GONE_QUEUED, Outcome.CLIENT_GONE_STREAMING, Outcome.CLIENT_STALLED})


@dataclass(frozen=True, slots=True)
class Sample:
    """One request's verdicts; None = the promise does not apply to it."""

    at: int
    admitted: bool
    met: dict[tuple[str, str], bool | None]  # (view, slo) → kept?


class _Window:
    """The samples of one class, and running counts of them, so that reading costs nothing."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque()
        self.kept = dict.fromkeys(_COUNTED, 0)
        self.counted = dict.fromkeys(_COUNTED, 0)

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        self._count(sample, 1)

    def drop_oldest(self) -> None:
        self._count(self.samples.popleft(), -1)

    def _count(self, sample: Sample, by: int) -> None:
        for (view, slo), met in sample.met.items():
            if met is not None:
                for of in WHOLES if sample.admitted else _OFFERED_ONLY:
                    self.counted[view, slo, of] += by
                    self.kept[view, slo, of] += by * met


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
        if targets is None or event.outcome in CALLERS_OWN or event.by_tenant_limit:
            return None
        sample = _judge(event, targets)
        if sample is not None:
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
        return window.kept[view, slo, of], window.counted[view, slo, of]


def _judge(event: RequestEnded, targets: SloTargets) -> Sample | None:
    if not event.streaming:
        return None
    let_down = event.outcome is not Outcome.COMPLETED
    if event.outcome in _CLIENT_LEFT:
        waited = event.ended_at - event.arrived_at
        broken = event.ttft_ns is None and targets.ttft_ns is not None and waited > targets.ttft_ns
        if event.ttft_ns is None and not broken:
            return None
        let_down = broken  # one that got its tokens and left is judged by what it got
    met: dict[tuple[str, str], bool | None] = {}
    for view, ttft in (("arrival", event.ttft_ns), ("dispatch", event.upstream_ttft_ns)):
        verdicts = [
            _verdict(measured, target, let_down)
            for measured, target in (
                (ttft, targets.ttft_ns),
                (event.tpot_ns, targets.tpot_ns),
                (event.max_gap_ns, targets.max_gap_ns),
            )
        ]
        met[view, "ttft"], met[view, "tpot"], _ = verdicts
        told = [verdict for verdict in verdicts if verdict is not None]
        met[view, "all"] = all(told) if told else None
    admitted = event.queue_wait_ns is not None
    return Sample(event.ended_at, admitted, met)


def _verdict(measured: int | None, target: int | None, let_down: bool) -> bool | None:
    """None where nothing is promised, or nothing could be measured of one that was served."""
    if target is None or (measured is None and not let_down):
        return None
    return not let_down and measured is not None and measured <= target
