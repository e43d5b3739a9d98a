"""The scenario the gateway is for, as workloads: one long prompt in a full batch, and a stream of them.

Used on virtual time by the tests of the simulator and with real processes by `make seed-scenario`.
"""

from gateway.policy.request import Priority
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Caller,
    ClosedStream,
    EvenStream,
    FixedLengths,
    Lengths,
    LengthSource,
    PoissonStream,
    Workload,
)

PRESET = "seed_32k"

USERS = 64
USERS_JOIN_EVERY_SECONDS = 0.13
"""So that no two prompts meet in one iteration."""
USERS_LENGTHS = Lengths(1000, 3000)
"""When all have joined and the long prompt comes, the 64 contexts are 80,000 tokens together."""
LONG_PROMPT_AT_SECONDS = 14.0
QUIET_FROM_SECONDS = 10.0
"""All users have had their first token."""
STALL_SECONDS = 20.0

LONG_PROMPT = Lengths(32_768, 128)
BATCH_CLIENTS = 4
BATCH_FROM_SECONDS = 5.0
"""Conversations are under way by then; before, there is nobody to disturb and a prompt may go at once."""
PER_SECOND = 1.0


def stalled_users(*, long_prompt: bool = True) -> Workload:
    """64 users whose answers go on and on, and one long prompt in their midst."""
    users = EvenStream(
        Caller(Priority.P0, "users"), USERS_JOIN_EVERY_SECONDS, FixedLengths(USERS_LENGTHS), requests=USERS
    )
    long = EvenStream(
        Caller(Priority.P2, "batch"), 1.0, FixedLengths(LONG_PROMPT), LONG_PROMPT_AT_SECONDS, requests=1
    )
    return Workload(open=(users, long) if long_prompt else (users,))


def endless_long_prompts(lengths: LengthSource = CHAT_LENGTHS) -> Workload:
    """One P0 and one P1 conversation a second, and P2 clients that always have a long prompt to send."""
    return Workload(
        open=(
            PoissonStream(Caller(Priority.P0, "realtime"), PER_SECOND, lengths),
            PoissonStream(Caller(Priority.P1, "normal"), PER_SECOND, lengths),
        ),
        closed=(
            ClosedStream(
                Caller(Priority.P2, "batch"),
                BATCH_CLIENTS,
                FixedLengths(LONG_PROMPT),
                from_seconds=BATCH_FROM_SECONDS,
            ),
        ),
    )
