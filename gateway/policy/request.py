"""What the policy knows of a request, and the ticket that stands for it from arrival to its end."""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple

from gateway.policy.clock import NEVER
from gateway.policy.outcome import Outcome


class Priority(IntEnum):
    """Traffic class; the smaller goes first. Its public name is `P0`, never the number: engines disagree
    on which sign is urgent."""

    P0 = 0
    P1 = 1
    P2 = 2


PRIORITIES = tuple(Priority)


class Ask(NamedTuple):
    """Facts of a request, complete before the policy sees it.

    `input_tokens` is the estimate (at least 1); `max_output_tokens` what the client allows per sequence,
    None when it does not say, 0 for what generates nothing (embeddings, scores); `sequences` is `n` times
    the number of prompts. `client_timeout_ns` is how long the client said it will wait, None when it did
    not. `key` is the id of the key it came with. `fairness_id` is the sub-tenant that a trusted key names:
    fairness is then between sub-tenants, while the limits stay the tenant's. `claimed` is the class asked
    for, None if that is the one it got.
    """

    request_id: str
    priority: Priority
    tenant: str
    model: str
    input_tokens: int
    max_output_tokens: int | None = None
    sequences: int = 1
    prompts: int = 1
    body_bytes: int = 0
    streaming: bool = True
    client_timeout_ns: int | None = None
    key: str | None = None
    fairness_id: str | None = None
    claimed: Priority | None = None


class Usage(NamedTuple):
    """Tokens a request really used, over all its sequences."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was told no, and when to come back.

    `retry_after_ns` None means that no wait is known to help. `detail` is a sentence for the client.
    `by_tenant_limit`: the tenant's own limit said so, which is no fault of the class.
    """

    outcome: Outcome
    detail: str
    retry_after_ns: int | None = None
    by_tenant_limit: bool = False


class Stage(Enum):
    THROTTLED = "throttled"
    """Waits for tokens of its class."""
    READY = "ready"
    """Paid; waits for a place at an upstream."""
    DISPATCHED = "dispatched"
    """Holds a lease on an upstream."""
    ENDED = "ended"


class Ticket:
    """One request inside the policy. Only the policy writes to it; drivers read, and keep their own
    objects in `waiter` and `progress`."""

    __slots__ = (
        "arrived_at",
        "ask",
        "assumed_at",
        "charged",
        "cost",
        "deadline",
        "dispatched_at",
        "exempt",
        "first_token_at",
        "first_token_seq",
        "had_engine_alone",
        "input_tokens",
        "is_long",
        "measured_at",
        "measured_tokens",
        "not_reached",
        "on_own_share",
        "outcome",
        "output_reserve",
        "own_units",
        "paid_at",
        "pool",
        "prefilling",
        "priority",
        "progress",
        "promoted",
        "refusal",
        "requeued_at",
        "requeued_seq",
        "route",
        "seen",
        "seq",
        "stage",
        "tenant",
        "tenant_charged",
        "tenant_requests_charged",
        "tenant_reserved",
        "total_tokens",
        "upstream",
        "waiter",
        "would_be",
    )

    def __init__(self, seq: int, ask: Ask, arrived_at: int) -> None:
        self.seq = seq
        self.ask = ask
        self.priority = ask.priority
        self.tenant = ask.tenant if ask.fairness_id is None else ask.fairness_id  # for fairness
        self.arrived_at = arrived_at
        self.input_tokens = ask.input_tokens
        self.output_reserve = 0  # tokens, over all sequences
        self.total_tokens = 0  # input and reserved output, what the engine's KV memory may come to hold
        self.cost = 0  # millitokens
        self.charged = 0  # millitokens taken from the class bucket and not given back
        self.on_own_share = False  # charged to the class's own share alone
        self.own_units = 0  # what the charge took from the class's own level
        self.tenant_reserved = False  # the tenant's limits hold a charge and a place of its key
        self.tenant_charged = 0  # millitokens
        self.tenant_requests_charged = 0  # thousandths of a request
        self.exempt = False  # never charged: its refusal was only observed
        self.would_be: Outcome | None = None  # the refusal that was only observed
        self.is_long = False
        self.stage = Stage.THROTTLED
        self.deadline = NEVER  # to be dispatched by then
        self.paid_at: int | None = None
        self.dispatched_at: int | None = None
        self.first_token_at: int | None = None
        self.had_engine_alone = False  # when dispatched, hardly any other prompt was being worked on
        self.prefilling = False  # dispatched, first token not yet seen
        self.assumed_at = NEVER  # when its first token counts as seen, for an answer that is not streamed
        self.promoted = False
        self.requeued_at: int | None = None  # an engine sent it back for want of room, or was not reached
        self.not_reached: str | None = None  # the upstream that could not be connected to
        self.requeued_seq: int | None = None
        self.first_token_seq: int | None = None
        self.seen: Any = None  # events.Seen, if somebody wants details
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None
        self.route: Any = None  # routes.Route
        self.pool: Any = None  # pool.Pool
        self.upstream: Any = None  # upstream_slots.UpstreamSlots, once dispatched
        self.waiter: Any = None
        self.progress: Any = None  # control_signals.Progress of a stream; the driver's
        self.measured_at = 0  # its last token that the control signals have taken in
        self.measured_tokens = 0

    @property
    def requeued(self) -> bool:
        return self.requeued_at is not None

    @property
    def queue_wait_ns(self) -> int | None:
        """From arrival to dispatch; None if it never was dispatched."""
        return None if self.dispatched_at is None else self.dispatched_at - self.arrived_at

    def __repr__(self) -> str:
        return f"<Ticket {self.seq} {self.priority.name} {self.stage.value} cost={self.cost}>"
