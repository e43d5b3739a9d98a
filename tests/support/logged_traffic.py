"""Traffic of every kind on virtual time, with a decision log listening."""

import random
from collections.abc import Callable
from typing import Any

from gateway.policy.admission import NOTHING_DELIVERED, Admission, Delivered
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.engine_load import EngineLoad
from gateway.policy.outcome import Outcome
from gateway.policy.parameters import PolicyParameters
from gateway.policy.request import PRIORITIES, Stage, Ticket, Usage
from gateway.simulator.virtual_time import VirtualGate
from gateway.telemetry.decision_log import Configuration, DecisionLog
from gateway.telemetry.fanout import Observers
from tests.support.drivers import VirtualDriver
from tests.support.policy_settings import ask

SECOND = NANOSECONDS_PER_SECOND


class LoggedTraffic(VirtualDriver):
    """Requests of all classes and kinds, which end in every way there is. All times are multiples of
    `grain_ns` (but for what engines tell of themselves): with a coarse one much happens at one instant."""

    def __init__(
        self, parameters: PolicyParameters, seed: int, *, grain_ns: int = 1, models: str = "m"
    ) -> None:
        super().__init__(parameters)
        self.lines: list[str] = []
        self.configuration = Configuration(parameters, self.clock, "0", lambda: 10**18 + self.clock.now())
        self.lines.append(self.configuration.line())
        observers = Observers(self.endings, DecisionLog(self.lines.append))
        self.admission = Admission(parameters, self.clock, observers)
        self.gate = VirtualGate(self.admission, self.time, self.decided)
        self._random = random.Random(seed)
        self._grain = grain_ns
        self._models = models

    def book(self, requests: int, seconds: float) -> None:
        """Requests come over so many seconds; engines go, come back and tell of themselves meanwhile."""
        span = round(seconds * SECOND)
        names = [upstream.name for upstream in self.admission.parameters.upstreams]
        for number in range(requests):
            self.at(self._within(span), lambda name=f"r{number}": self._arrive(name))  # type: ignore[misc]
        for name in names:
            for _ in range(round(seconds)):
                self.at(self._within(span) + 1, lambda name=name: self._tell_load(name))  # type: ignore[misc]
            down = self._within(span) + 2
            self.at(down, lambda name=name: self._is(name, False))  # type: ignore[misc]
            self.at(down + self._up_to(4.0), lambda name=name: self._is(name, True))  # type: ignore[misc]

    def reload(self, parameters: PolicyParameters) -> None:
        """Other settings from now on, in the log too. What came for a model that nobody serves any longer
        does not come as far as the policy, and an engine that was left out tells nothing more."""
        self.reconfigure(parameters)
        self.configuration.take(parameters, self.clock.now())
        self.lines.append(self.configuration.line())

    def decided(self, ticket: Ticket) -> None:
        super().decided(ticket)
        if ticket.stage is Stage.DISPATCHED:
            self._serve(ticket)

    # ------------------------------------------------------------------ inside

    def _within(self, span: int) -> int:
        return self._random.randrange(0, span, self._grain)

    def _up_to(self, seconds: float) -> int:
        return self._random.randrange(self._grain, round(seconds * SECOND) + self._grain, self._grain)

    def _arrive(self, name: str) -> None:
        chance = self._random
        given: dict[str, Any] = {
            "tenant": chance.choice("uvw"),
            "model": chance.choice(self._models),
            "key": f"key-{chance.choice('123')}",
            "body_bytes": chance.choice([0, 10, 10, 300]),
            "streaming": chance.random() < 0.7,
            "max_output_tokens": chance.choice([None, None, 0, 5, 40]),
            "claimed": chance.choice([None, *PRIORITIES]),
            "fairness_id": chance.choice([None, None, "sub"]),
        }
        if chance.random() < 0.2:
            given["timeout"] = chance.choice([0.5, 3.0])
        if chance.random() < 0.2:
            given["sequences"], given["prompts"] = chance.choice([(2, 1), (2, 2), (6, 3)])
        tokens = chance.choice([1, 1, 5, 5, 20, 60, 121, 200, 450])
        request = ask(name, chance.choice(PRIORITIES), tokens, **given)
        if not self.admission.serves(request.model):
            return
        ticket = self._submit(request)
        self.tickets[name] = ticket
        if chance.random() < 0.15:
            self._after(self._up_to(2.0), lambda: self.admission.cancel(ticket))

    def _serve(self, ticket: Ticket) -> None:
        chance, fate = self._random, self._random.random()
        first, rest = self._up_to(0.4), self._up_to(1.5)
        if fate < 0.06 and self.admission.may_requeue(ticket):
            self._after(first, lambda: self._send_back(ticket))
        elif fate < 0.12:
            self._after(first, lambda: self.admission.finish(ticket, Outcome.UPSTREAM_REFUSED))
        else:
            if ticket.ask.streaming:
                self._after(first, lambda: self.admission.first_token(ticket))
            outcome = chance.choice([Outcome.COMPLETED] * 8 + [Outcome.CLIENT_GONE_STREAMING])
            output = chance.choice([0, 1, 7, 40, 300]) * ticket.ask.sequences
            usage = Usage(
                max(ticket.ask.input_tokens + chance.choice([-3, 0, 0, 9]), 1), output, chance.choice([0, 1])
            )
            gap = chance.choice([None, 1_000_000, 777_777_777])
            self._after(first + rest, lambda: self._end(ticket, outcome, usage, gap))

    def _end(self, ticket: Ticket, outcome: Outcome, usage: Usage, gap: int | None) -> None:
        delivered = Delivered(usage, self.clock.now() - 1, gap) if ticket.ask.streaming else Delivered(usage)
        self.admission.finish(ticket, outcome, delivered)

    def _send_back(self, ticket: Ticket) -> None:
        if self.admission.may_requeue(ticket):
            self.admission.requeue(ticket)
        else:
            self.admission.finish(ticket, Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED)

    def _tell_load(self, name: str) -> None:
        chance = self._random
        load = EngineLoad(3, chance.choice([0, 0, 0, 6, 20]), chance.choice([0.1, 0.5, 0.93, None]), 5000)
        if self._configured(name):
            self.engine_load(name, load)

    def _is(self, name: str, healthy: bool) -> None:
        if self._configured(name):
            self.health(name, healthy)

    def _configured(self, name: str) -> bool:
        return any(upstream.name == name for upstream in self.admission.parameters.upstreams)

    def _after(self, delay: int, act: Callable[[], object]) -> None:
        def acted() -> None:
            act()
            self.gate.settle()

        self.at(self.clock.now() + delay, acted)
