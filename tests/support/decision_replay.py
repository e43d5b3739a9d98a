"""A decision log played into a fresh policy on virtual time, which should decide the same again.

What came from outside is told anew at the logged instants: arrivals, first tokens, ends with their usage,
clients that left, engines that went, came back, told their load or sent a request back, and what a control
law made of gaps and waits that no log has. What the policy decided by itself – refusals, time-outs, who goes
where and when, what is charged – is left to it.
"""

from collections.abc import Callable, Iterator
from functools import partial

from gateway.policy.admission import Admission, Delivered
from gateway.policy.events import Observer, Order, RatesChanged, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ticket
from gateway.simulator.decision_log import (
    HealthChanged,
    LoadTold,
    LoggedRun,
    Reconfigured,
    TrialAllowed,
)
from gateway.simulator.virtual_time import VirtualGate, VirtualTime

DECIDED_BY_THE_POLICY = frozenset(
    {
        Outcome.REJECTED_RATE,
        Outcome.REJECTED_QUEUE_FULL,
        Outcome.QUEUE_TIMEOUT,
        Outcome.REJECTED_NO_UPSTREAM,
        Outcome.REJECTED_DRAINING,
    }
)
"""Of requests that were not at an engine when they ended."""

FIRST = -1
Input = tuple[int, int, Callable[[], object]]
"""When, its place among what happens at that instant, and what."""


def offered(run: LoggedRun) -> list[RequestEnded]:
    """The logged requests that came as far as the policy."""
    return [request for request in run.requests if request.ask is not None]


def replayed(run: LoggedRun) -> list[RequestEnded]:
    """How the requests of a run end when its inputs come again, in the order of their ends."""
    return _Replay(run).play()


class _Endings(Observer):
    wants_details = True

    def __init__(self) -> None:
        self.records: list[RequestEnded] = []

    def ended(self, event: RequestEnded) -> None:
        self.records.append(event)


class _Replay:
    def __init__(self, run: LoggedRun) -> None:
        self._run = run
        self._endings = _Endings()
        self._time = VirtualTime(run.began_at)
        self._admission = Admission(run.parameters, self._time.clock, self._endings)
        self._admission.follow_rates()
        self._gate = VirtualGate(self._admission, self._time)
        self._tickets: dict[int, Ticket] = {}

    def play(self) -> list[RequestEnded]:
        inputs = sorted(self._inputs(), key=lambda entry: entry[:2])
        for at, _, act in inputs:
            self._time.at(at, self._settled(act))
        ends = (request.ended_at for request in self._run.requests)
        self._time.run(max([at for at, _, _ in inputs] + list(ends), default=0))
        return self._endings.records

    def _settled(self, act: Callable[[], object]) -> Callable[[], None]:
        def acted() -> None:
            act()
            self._gate.settle()

        return acted

    def _inputs(self) -> Iterator[Input]:
        for event in self._run.events:
            match event:
                case RequestEnded() if event.order is not None:
                    yield from self._of_request(event, event.order)
                case RatesChanged() if event.applied:
                    yield event.at, event.order, partial(self._admission.rates_told, event)
                case HealthChanged(name, healthy, at):
                    yield at, FIRST, partial(self._admission.set_upstream_health, name, healthy)
                case TrialAllowed(name, at):
                    yield at, FIRST, partial(self._admission.set_upstream_trial, name)
                case LoadTold(name, load, at):
                    yield at, FIRST, partial(self._admission.engine_load_told, name, load)
                case Reconfigured(parameters, at):
                    yield at, FIRST, partial(self._admission.reconfigure, parameters)

    def _of_request(self, request: RequestEnded, order: Order) -> Iterator[Input]:
        yield request.arrived_at, order.arrived, partial(self._submit, request)
        if request.requeued_at is not None:
            assert order.requeued is not None
            yield request.requeued_at, order.requeued, partial(self._requeue, request)
        if request.ttft_ns is not None:
            assert order.first_token is not None
            yield request.arrived_at + request.ttft_ns, order.first_token, partial(self._first_token, request)
        if request.upstream is not None:
            yield request.ended_at, order.ended, partial(self._finish, request)
        elif request.outcome is Outcome.REJECTED_DRAINING:
            yield request.ended_at, order.ended, self._admission.drain  # again and again: no harm
        elif request.outcome not in DECIDED_BY_THE_POLICY:
            yield request.ended_at, order.ended, partial(self._cancel, request)

    # ------------------------------------------------------------------ what comes from outside

    def _submit(self, request: RequestEnded) -> None:
        assert request.ask is not None
        self._tickets[id(request)] = self._admission.submit(request.ask)

    def _requeue(self, request: RequestEnded) -> None:
        self._admission.requeue(self._tickets[id(request)], reached=request.not_reached is None)

    def _first_token(self, request: RequestEnded) -> None:
        self._admission.first_token(self._tickets[id(request)])

    def _finish(self, request: RequestEnded) -> None:
        self._admission.finish(self._tickets[id(request)], request.outcome, delivered_to(request))

    def _cancel(self, request: RequestEnded) -> None:
        self._admission.cancel(self._tickets[id(request)], request.outcome)


def delivered_to(request: RequestEnded) -> Delivered:
    """What its engine gave it. The last token's time is one that leads to the logged time per token."""
    last = None
    if request.tpot_ns is not None:
        assert request.usage is not None
        assert request.ask is not None
        assert request.ttft_ns is not None
        steps = request.usage.output_tokens // request.ask.sequences - 1
        last = request.arrived_at + request.ttft_ns + request.tpot_ns * steps
    return Delivered(request.usage, last, request.max_gap_ns)
