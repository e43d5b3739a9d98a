"""A workload against simulated engines, through the gateway's policy or straight, on virtual time.

Requests arrive for so many seconds; then the run goes on until all that has begun or waits is over, so that
every request has its one ending. The same workload, parameters and seed give the same run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gateway.mock_backend.gpu_model import GpuPreset
from gateway.policy.admission import Admission
from gateway.policy.clock import Clock, to_nanoseconds
from gateway.policy.events import RatesChanged, RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import Priority
from gateway.simulator.doors import Client, Door, GatewayDoor, OpenDoor, Request, Watch
from gateway.simulator.virtual_time import VirtualTime
from gateway.simulator.workload import (
    Arrival,
    Caller,
    Lengths,
    Workload,
    generator,
    retry_wait_ns,
    sdk_retry_ns,
)

PROGRESS_STEPS = 50


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    """For how long requests arrived."""
    records: list[RequestEnded]
    """One for each request, in the order of their endings."""
    iterations: int
    """Of all engines together."""
    admission: Admission | None
    """The policy as it was left; None where there was none."""
    initial_rates: tuple[int, ...] = ()
    """Of the class buckets of all pools together, millitokens per second."""
    rate_changes: Sequence[RatesChanged] = ()
    retries: Sequence[Priority] = ()
    """The classes of the requests that came back."""


class Experiment:
    """The engines are the upstreams of `parameters`, each with the preset of its name. Without `gateway`
    nothing else of the parameters counts but what tokens weigh."""

    def __init__(
        self,
        workload: Workload,
        parameters: PolicyParameters,
        presets: Mapping[str, GpuPreset],
        *,
        seed: int,
        seconds: float,
        gateway: bool = True,
        watch: Watch | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """`progress` is told which part of `seconds` has passed, some times."""
        self._workload = workload
        self._seed = seed
        self._seconds = seconds
        self._end = to_nanoseconds(seconds)
        self._time = VirtualTime()
        self._records: list[RequestEnded] = []
        self._requests = 0
        self._retries: list[Priority] = []
        self._progress = progress
        door = GatewayDoor if gateway else OpenDoor
        self._door: Door = door(self._time, parameters, presets, self._records, self._ended, watch)

    @property
    def admission(self) -> Admission | None:
        """The policy, to look at or to change before the run; None where there is none."""
        return self._door.admission if isinstance(self._door, GatewayDoor) else None

    @property
    def clock(self) -> Clock:
        return self._time.clock

    def run(self) -> Run:
        for index, stream in enumerate(self._workload.open):
            self._book(stream.arrivals(generator(self._seed, "open", index)), stream.caller)
        for index, closed in enumerate(self._workload.closed):
            for number in range(closed.clients):
                client = Client(closed, generator(self._seed, "closed", index, number))
                self._ask_at(to_nanoseconds(closed.from_seconds), client)
        if self._progress is not None:
            for step in range(1, PROGRESS_STEPS + 1):
                part = step / PROGRESS_STEPS
                self._time.at(round(self._end * part), partial(self._progress, part))
        self._time.run()
        iterations = sum(engine.iterations for engine in self._door.engines.values())
        door = self._door
        if not isinstance(door, GatewayDoor):
            return Run(self._seconds, self._records, iterations, None, retries=self._retries)
        rates = door.initial_rates, door.rate_changes
        return Run(self._seconds, self._records, iterations, door.admission, *rates, self._retries)

    def _book(self, arrivals: Iterator[Arrival], caller: Caller) -> None:
        """The next arrival of an open stream; the one after it when that has come."""
        arrival = next(arrivals, None)
        if arrival is not None and arrival.at < self._end:
            self._time.at(arrival.at, lambda: self._arrive(arrival, arrivals, caller))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], caller: Caller) -> None:
        self._submit(arrival.caller or caller, arrival.lengths, None)
        self._book(arrivals, caller)

    def _ask_at(self, at: int, client: Client) -> None:
        if at < self._end:
            self._time.at(at, lambda: self._ask(client))

    def _ask(self, client: Client) -> None:
        self._submit(client.stream.caller, client.stream.lengths.draw(client.random), client)

    def _submit(self, caller: Caller, lengths: Lengths, client: Client | None, attempt: int = 0) -> None:
        self._requests += 1
        self._door.submit(Request(self._requests, caller, lengths, self._time.now, client, attempt))

    def _ended(self, request: Request, outcome: Outcome, retry_after_ns: int | None) -> None:
        client = request.client
        if outcome is Outcome.COMPLETED:
            if client is not None:
                self._think(client)
        elif client is not None and client.stream.retries is None:
            self._ask_at(self._time.now + retry_wait_ns(retry_after_ns, client.random), client)
        else:
            self._retry_or_give_up(request, outcome, retry_after_ns)

    def _think(self, client: Client) -> None:
        self._ask_at(self._time.now + to_nanoseconds(client.stream.think_seconds), client)

    def _retry_or_give_up(self, request: Request, outcome: Outcome, retry_after_ns: int | None) -> None:
        client = request.client
        retries = self._workload.retries if client is None else client.stream.retries
        wait = None
        if request.attempt < (retries or 0):
            random = generator(self._seed, "retry", request.number) if client is None else client.random
            wait = sdk_retry_ns(outcome, retry_after_ns, random)
        if wait is not None:
            at = self._time.now + wait
            if at < self._end:
                self._time.at(at, lambda: self._come_back(request))
        elif client is not None:
            self._think(client)

    def _come_back(self, request: Request) -> None:
        self._retries.append(request.caller.priority)
        self._submit(request.caller, request.lengths, request.client, request.attempt + 1)
