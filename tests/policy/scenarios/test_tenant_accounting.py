"""What is taken from a tenant is given back or was used, however its requests end. Time stands still, so that
nothing flows back and every sum is exact."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from gateway.policy.admission import RequestTooLong
from gateway.policy.minute_bucket import UNITS_PER_MILLI
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters, TenantParameters
from gateway.policy.request import Priority, Stage, Ticket
from tests.support.drivers import VirtualDriver, assert_quiet
from tests.support.policy_settings import P2, policy, upstream

TENANTS = {
    "both": TenantParameters(tokens_per_minute=10_000, requests_per_minute=50),
    "requests": TenantParameters(requests_per_minute=9),
    "tokens": TenantParameters(tokens_per_minute=3000),
}
STEPS = 200


def _parameters(chance: random.Random) -> PolicyParameters:
    """Places, queues and buckets of many sizes; in some P2 is only observed."""
    parameters = policy(
        upstream("a", max_in_flight=chance.choice((1, 3, None)), tokens_per_second=1000),
        upstream("b", max_in_flight=2, tokens_per_second=1000),
        capacity={
            "burst_seconds": chance.choice((0.5, 100)),
            "min_burst_tokens": 0,
            "initial_output_tokens": 20,
            "output_weight": 1.0,
            "max_debt_seconds": 1000,
        },
        throttle=chance.choice((0, 5)),
        max_queued_requests=chance.choice((0, 2, None)),
    )
    observed = replace(parameters.classes[P2], observe=chance.random() < 0.3)
    return replace(
        parameters,
        classes={**parameters.classes, P2: observed},
        tenants=TENANTS,
        key_max_in_flight={"three": 3, "one": 1},
    )


class Traffic:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.driver = VirtualDriver(_parameters(self.chance))
        self.tokens: Counter[str] = Counter()
        """Used by each tenant, by the engine's word."""
        self.requests: Counter[str] = Counter()
        """Of each tenant, that an engine ran."""

    def step(self, name: str) -> None:
        open_tickets = [t for t in self.driver.tickets.values() if t.stage is not Stage.ENDED]
        if not open_tickets or self.chance.random() < 0.5:
            self._submit(name)
        else:
            self._go_on(self.chance.choice(open_tickets))

    def _submit(self, name: str) -> None:
        choice = self.chance.choice
        try:
            self.driver.submit(
                name,
                choice(list(Priority)),
                choice((1, 50, 400, 2900, 3100)),
                tenant=choice(list(TENANTS)),
                key=choice(("three", "one", None)),
                max_output_tokens=choice((None, 5, 100)),
            )
        except RequestTooLong:
            pass

    def _go_on(self, ticket: Ticket) -> None:
        admission, name = self.driver.admission, ticket.ask.request_id
        what = self.chance.random()
        if ticket.stage is not Stage.DISPATCHED:
            self.driver.cancel(name)
        elif what < 0.2 and admission.may_requeue(ticket):
            admission.requeue(ticket)
            self.driver.gate.settle()
        elif what < 0.5:
            self.driver.finish(name, -1, outcome=Outcome.UPSTREAM_ERROR)
        else:
            output = self.chance.choice((0, 10, 300))
            self.driver.finish(name, output=output)
            if not ticket.exempt:
                self.tokens[ticket.ask.tenant] += ticket.ask.input_tokens + output
                self.requests[ticket.ask.tenant] += 1

    def end(self) -> None:
        """All leave."""
        for name, ticket in self.driver.tickets.items():
            self.driver.cancel(name)
            if ticket.stage is Stage.DISPATCHED:
                self.driver.finish(name, -1, outcome=Outcome.UPSTREAM_ERROR)


@pytest.mark.parametrize("seed", range(20))
def test_a_tenants_books_balance(seed: int) -> None:
    """After any mix of endings a tenant lacks what the engines used for it, to the last unit, and no key has
    a place left."""
    traffic = Traffic(seed)
    for n in range(STEPS):
        traffic.step(f"r{n}")
    traffic.end()
    limits = traffic.driver.admission.tenants
    for tenant in TENANTS:
        tokens, requests = limits.buckets(tenant, 0)
        for bucket, used in ((tokens, traffic.tokens[tenant]), (requests, traffic.requests[tenant])):
            if bucket is not None:
                assert bucket._level == bucket._full - used * 1000 * UNITS_PER_MILLI
    assert not limits.key_places._in_flight
    assert traffic.driver.clock.now() == 0
    assert_quiet(traffic.driver)
