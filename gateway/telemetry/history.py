"""The last minutes of the policy, by the second, so that a chart that is opened just now has a past."""

from collections import deque
from dataclasses import dataclass

from gateway.policy.admission import Admission
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES
from gateway.telemetry.recent import Recent

INTERVAL_SECONDS = 1.0
SAMPLES_KEPT = 300

ByClass = list[float]
ByClassOrNothing = list[float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Lists are by class, P0 first; of several pools the sum, and of severities the largest. `ended_total`
    and `refused_total` count from the start. Attainment is of all promises together, from arrival."""

    number: int
    at: int
    capacity_tokens_per_second: float
    nominal_tokens_per_second: float
    severity: float | None
    rate_tokens_per_second: ByClass
    bucket_tokens: ByClass
    waiting: list[int]
    in_flight: list[int]
    attainment_of_admitted: ByClassOrNothing
    attainment_of_offered: ByClassOrNothing
    ended_total: list[int]
    refused_total: list[int]


class History:
    def __init__(self, admission: Admission, recent: Recent) -> None:
        self._admission = admission
        self._recent = recent
        self._samples: deque[Sample] = deque(maxlen=SAMPLES_KEPT)
        self._taken = 0

    def take(self, now: int) -> None:
        """One more sample. Buckets are refilled up to `now` first; nothing else changes."""
        admission, recent = self._admission, self._recent
        pools, monitor = admission.pools, admission.slo_monitor
        for pool in pools:
            pool.buckets.advance(now)
        upstreams = admission.at_work
        severities = [pool.control.severity for pool in pools]
        recent.tick(now)
        self._taken += 1
        self._samples.append(
            Sample(
                number=self._taken,
                at=now,
                capacity_tokens_per_second=sum(pool.buckets.capacity for pool in pools) / MILLITOKENS,
                nominal_tokens_per_second=sum(
                    pool.control.limits.nominal * pool.part_of_budget for pool in pools
                )
                / MILLITOKENS,
                severity=max((each for each in severities if each is not None), default=None),
                rate_tokens_per_second=[
                    sum(pool.buckets.rates[p] for pool in pools) / MILLITOKENS for p in PRIORITIES
                ],
                bucket_tokens=[sum(pool.buckets.level_tokens(p) for pool in pools) for p in PRIORITIES],
                waiting=[sum(pool.depth(p) for pool in pools) for p in PRIORITIES],
                in_flight=[sum(slots.in_flight[p] for slots in upstreams) for p in PRIORITIES],
                attainment_of_admitted=[
                    monitor.attainment(p, "all", "arrival", "admitted", now) for p in PRIORITIES
                ],
                attainment_of_offered=[
                    monitor.attainment(p, "all", "arrival", "offered", now) for p in PRIORITIES
                ],
                ended_total=[recent.totals[p].total() for p in PRIORITIES],
                refused_total=[recent.refused(p) for p in PRIORITIES],
            )
        )

    def after(self, number: int) -> list[Sample]:
        """The samples kept that are newer than that one, oldest first."""
        return [sample for sample in self._samples if sample.number > number]
