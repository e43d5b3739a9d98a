"""What stands between the clients and the engines: nothing, or the gateway's policy.

A door gets requests and sees each to its one ending: a record for the report, and a word to the client. The
policy is the real one, driven by a VirtualGate; what else a gateway process does (sockets, parsing, the
relay) takes no time here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from gateway.mock_backend.gpu_model import GpuPreset
from gateway.policy.admission import NOTHING_DELIVERED, Admission, Delivered, RequestTooLong
from gateway.policy.events import Observer, RatesChanged, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Ask, Ticket, Usage
from gateway.policy.token_cost import usage_millitokens
from gateway.simulator.engine import Generation, VirtualEngine
from gateway.simulator.virtual_time import VirtualGate, VirtualTime
from gateway.simulator.workload import Caller, ClosedStream, Lengths


@dataclass(frozen=True, slots=True)
class Client:
    """One client of a closed stream, with the generator it draws from."""

    stream: ClosedStream
    random: Random


class Request(Generation):
    """One request, from its arrival on. `client` is who waits for its end, in a closed stream; `attempt`
    counts from 0 how often it has come back."""

    __slots__ = ("arrived_at", "attempt", "caller", "client", "engine", "lengths", "number", "ticket")

    def __init__(
        self,
        number: int,
        caller: Caller,
        lengths: Lengths,
        arrived_at: int,
        client: Client | None = None,
        attempt: int = 0,
    ) -> None:
        super().__init__()
        self.number = number
        self.caller = caller
        self.lengths = lengths
        self.arrived_at = arrived_at
        self.client = client
        self.attempt = attempt
        self.engine: str | None = None
        self.ticket: Ticket | None = None

    @property
    def delivered(self) -> Delivered:
        output = min(self.output_tokens, self.lengths.output_tokens)  # an embedding ends without a token
        usage = Usage(self.lengths.input_tokens, output)
        return Delivered(usage, self.last_token_at, self.max_gap_ns)


Ended = Callable[[Request, Outcome, int | None], None]
"""A request, how it ended, and after how many nanoseconds to come back if it was refused."""
Watch = Callable[[Request, int], None]
"""A request and the time at which one more token of it appeared."""


class Door(ABC):
    """`records` receives all endings; `ended` is called for each, for the client's sake."""

    def __init__(
        self,
        time: VirtualTime,
        parameters: PolicyParameters,
        presets: Mapping[str, GpuPreset],
        records: list[RequestEnded],
        ended: Ended,
        watch: Watch | None = None,
    ) -> None:
        self._time = time
        self._parameters = parameters
        self._records = records
        self._ended = ended
        self.engines = {
            upstream.name: VirtualEngine(
                time, presets[upstream.name], self._first_token, self._finished, watch
            )
            for upstream in parameters.upstreams
        }

    @abstractmethod
    def submit(self, request: Request) -> None: ...

    @abstractmethod
    def _first_token(self, request: Request) -> None: ...

    @abstractmethod
    def _finished(self, request: Request) -> None: ...

    def _record(self, request: Request, outcome: Outcome, delivered: Delivered) -> None:
        """The ending of a request that the policy knows nothing of."""
        record = record_of(
            self._parameters,
            str(request.number),
            request.caller,
            outcome,
            arrived_at=request.arrived_at,
            dispatched_at=None if request.engine is None else request.arrived_at,
            first_token_at=request.first_token_at,
            ended_at=self._time.now,
            delivered=delivered,
            upstream=request.engine,
        )
        self._records.append(record)
        self._ended(request, outcome, None)


class OpenDoor(Door):
    """No gateway: every request goes at once to the engine that has the fewest."""

    def submit(self, request: Request) -> None:
        name, engine = min(self.engines.items(), key=lambda item: item[1].unfinished)
        request.engine = name
        try:
            engine.submit(request, request.lengths)
        except ValueError:
            self._record(request, Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED)

    def _first_token(self, request: Request) -> None:
        pass

    def _finished(self, request: Request) -> None:
        self._record(request, Outcome.COMPLETED, request.delivered)


class GatewayDoor(Door):
    """The policy decides. What it knows of a request is what a gateway would: not the answer's length."""

    def __init__(
        self,
        time: VirtualTime,
        parameters: PolicyParameters,
        presets: Mapping[str, GpuPreset],
        records: list[RequestEnded],
        ended: Ended,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(time, parameters, presets, records, ended, watch)
        self.rate_changes: list[RatesChanged] = []
        self.admission = Admission(parameters, time.clock, _Recorder(records, self.rate_changes))
        pools = self.admission.pools
        self.initial_rates = tuple(sum(pool.buckets.rates[p] for pool in pools) for p in PRIORITIES)
        self._gate = VirtualGate(self.admission, time, self._decided)

    def submit(self, request: Request) -> None:
        try:
            request.ticket = self.admission.submit(_ask(request))
        except RequestTooLong:
            self._record(request, Outcome.BAD_REQUEST, NOTHING_DELIVERED)
        else:
            request.ticket.waiter = request
        self._gate.settle()

    def _decided(self, ticket: Ticket) -> None:
        request: Request = ticket.waiter
        refusal = ticket.refusal
        if refusal is not None:
            self._ended(request, refusal.outcome, refusal.retry_after_ns)
            return
        engine = self.engines[ticket.upstream.name]
        ticket.progress = engine.progress(request)
        try:
            engine.submit(request, request.lengths)
        except ValueError:
            self.admission.finish(ticket, Outcome.UPSTREAM_ERROR)
            self._ended(request, Outcome.UPSTREAM_ERROR, None)

    def _first_token(self, request: Request) -> None:
        if request.caller.streaming:
            assert request.ticket is not None
            self.admission.first_token(request.ticket)
            self._gate.settle()

    def _finished(self, request: Request) -> None:
        assert request.ticket is not None
        self.admission.finish(request.ticket, Outcome.COMPLETED, request.delivered)
        self._ended(request, Outcome.COMPLETED, None)
        self._gate.settle()


def _ask(request: Request) -> Ask:
    caller = request.caller
    if caller.ask is not None:
        return caller.ask._replace(request_id=str(request.number))
    return Ask(
        request_id=str(request.number),
        priority=caller.priority,
        tenant=caller.tenant,
        model=caller.model,
        input_tokens=request.lengths.input_tokens,
        max_output_tokens=caller.max_output_tokens,
        streaming=caller.streaming,
    )


class _Recorder(Observer):
    def __init__(self, records: list[RequestEnded], rate_changes: list[RatesChanged]) -> None:
        self._records = records
        self._rate_changes = rate_changes

    def ended(self, event: RequestEnded) -> None:
        self._records.append(event)

    def rates_changed(self, event: RatesChanged) -> None:
        self._rate_changes.append(event)


def record_of(
    parameters: PolicyParameters,
    request_id: str,
    caller: Caller,
    outcome: Outcome,
    *,
    arrived_at: int,
    dispatched_at: int | None,
    first_token_at: int | None,
    ended_at: int,
    delivered: Delivered = NOTHING_DELIVERED,
    upstream: str | None = None,
) -> RequestEnded:
    """A record as the policy would write it, of a request seen from outside."""
    usage, last_token_at = delivered.usage, delivered.last_token_at
    tpot = None
    if first_token_at is not None and last_token_at is not None and usage is not None:
        steps = usage.output_tokens - 1
        tpot = (last_token_at - first_token_at) // steps if steps > 0 else None
    charged = 0
    if usage is not None:
        weight = parameters.classes[caller.priority].weight
        charged = usage_millitokens(weight, usage, parameters.capacity)
    return RequestEnded(
        request_id=request_id,
        priority=caller.priority,
        tenant=caller.tenant,
        model=caller.model,
        outcome=outcome,
        streaming=caller.streaming,
        upstream=upstream,
        arrived_at=arrived_at,
        ended_at=ended_at,
        queue_wait_ns=None if dispatched_at is None else dispatched_at - arrived_at,
        ttft_ns=None if first_token_at is None else first_token_at - arrived_at,
        upstream_ttft_ns=(
            None if first_token_at is None or dispatched_at is None else first_token_at - dispatched_at
        ),
        tpot_ns=tpot,
        max_gap_ns=delivered.max_gap_ns,
        usage=usage,
        estimated_cost=charged,
        charged=charged,
        promoted=False,
    )
