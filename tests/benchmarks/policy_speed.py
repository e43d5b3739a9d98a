"""How many requests a second the policy alone decides: submit → dispatch → first token → finish.

    make bench

One process, one thread, no I/O. The cost must not grow with the number of requests that wait. Figures are
the median of the runs; on a shared machine compare the columns of one run, not two runs.
"""

import statistics
import time

import typer

from gateway.policy.admission import Admission, Delivered
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import PRIORITIES, Ask, Stage, Usage
from gateway.policy_parameters import policy_parameters
from gateway.settings import Settings

USAGE = Delivered(Usage(200, 50))
STEP_NS = 50_000  # virtual time between requests


class SteppedClock:
    def __init__(self) -> None:
        self.time = NANOSECONDS_PER_SECOND

    def now(self) -> int:
        return self.time


def build() -> tuple[Admission, SteppedClock]:
    settings = Settings.model_validate(
        {
            "capacity": {"tokens_per_second": 1e9},
            "classes": {
                p.name: {"max_queued_requests": None, "max_queued_bytes": None, "max_wait_seconds": 1e6}
                for p in PRIORITIES
            },
            "scheduling": {"deadline_drop": False},
        }
    )
    clock = SteppedClock()
    return Admission(policy_parameters(settings), clock), clock


def requests_per_second(queued: int, tenants: int, requests: int) -> float:
    """Throughput with `queued` requests waiting all the time, spread over that many tenants."""
    admission, clock = build()
    running = []

    def submit(number: int) -> None:
        ask = Ask("r", PRIORITIES[number % 3], f"tenant-{number % tenants}", "m", 200, 50, body_bytes=2000)
        admission.submit(ask)

    def collect() -> None:
        running.extend(t for t in admission.take_decisions() if t.stage is Stage.DISPATCHED)

    slots = 128 if queued else 64
    for number in range(slots + queued):
        submit(number)
    collect()
    began = time.perf_counter()
    for number in range(requests):
        clock.time += STEP_NS
        submit(number)
        collect()
        ticket = running.pop(0)
        admission.first_token(ticket)
        clock.time += STEP_NS
        admission.finish(ticket, Outcome.COMPLETED, USAGE)
        admission.next_deadline()
        collect()
    return requests / (time.perf_counter() - began)


def main(runs: int = 5, requests: int = 5000) -> None:
    print(f"{'waiting':>8} {'tenants':>8} {'requests/s':>12} {'µs each':>9}")
    for queued, tenants in ((0, 1), (10, 1), (1000, 1), (1000, 100), (10_000, 1), (10_000, 10_000)):
        speed = statistics.median(requests_per_second(queued, tenants, requests) for _ in range(runs))
        print(f"{queued:>8} {tenants:>8} {speed:>12,.0f} {1e6 / speed:>9.1f}")


if __name__ == "__main__":
    typer.run(main)
