"""A workload against simulated engines, through the gateway's policy or straight, on virtual time.

Requests arrive for so many seconds; then the run goes on until all that has begun or waits is over, so that
every request has its one ending. The same workload, parameters and seed give the same run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.mock_backend.gpu_model import GpuPreset
from gateway.policy.admission import Admission
from gateway.policy.clock import to_nanoseconds
from gateway.policy.events import RequestEnded
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.simulator.doors import Client, Door, GatewayDoor, OpenDoor, Request, Watch
from gateway.simulator.virtual_time import VirtualTime
from gateway.simulator.workload import (
    Arrival,
    Caller,
    Lengths,
    Workload,
    generator,
    retry_wait_ns,
)


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
    ) -> None:
        self._workload = workload
        self._seed = seed
        self._seconds = seconds
        self._end = to_nanoseconds(seconds)
        self._time = VirtualTime()
        self._records: list[RequestEnded] = []
        self._requests = 0
        door = GatewayDoor if gateway else OpenDoor
        self._door: Door = door(self._time, parameters, presets, self._records, self._ended, watch)

    def run(self) -> Run:
        for index, stream in enumerate(self._workload.open):
            self._book(stream.arrivals(generator(self._seed, "open", index)), stream.caller)
        for index, closed in enumerate(self._workload.closed):
            for number in range(closed.clients):
                client = Client(closed, generator(self._seed, "closed", index, number))
                self._ask_at(to_nanoseconds(closed.from_seconds), client)
        self._time.run()
        iterations = sum(engine.iterations for engine in self._door.engines.values())
        admission = self._door.admission if isinstance(self._door, GatewayDoor) else None
        return Run(self._seconds, self._records, iterations, admission)

    def _book(self, arrivals: Iterator[Arrival], caller: Caller) -> None:
        """The next arrival of an open stream; the one after it when that has come."""
        arrival = next(arrivals, None)
        if arrival is not None and arrival.at < self._end:
            self._time.at(arrival.at, lambda: self._arrive(arrival, arrivals, caller))

    def _arrive(self, arrival: Arrival, arrivals: Iterator[Arrival], caller: Caller) -> None:
        self._submit(caller, arrival.lengths, None)
        self._book(arrivals, caller)

    def _ask_at(self, at: int, client: Client) -> None:
        if at < self._end:
            self._time.at(at, lambda: self._ask(client))

    def _ask(self, client: Client) -> None:
        self._submit(client.stream.caller, client.stream.lengths.draw(client.random), client)

    def _submit(self, caller: Caller, lengths: Lengths, client: Client | None) -> None:
        self._requests += 1
        self._door.submit(Request(self._requests, caller, lengths, self._time.now, client))

    def _ended(self, request: Request, outcome: Outcome, retry_after_ns: int | None) -> None:
        client = request.client
        if client is None:
            return
        if outcome is Outcome.COMPLETED:
            wait = to_nanoseconds(client.stream.think_seconds)
        else:
            wait = retry_wait_ns(retry_after_ns, client.random)
        self._ask_at(self._time.now + wait, client)
