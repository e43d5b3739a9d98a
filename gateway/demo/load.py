"""What the demo asks of the engine: conversations of two classes, and batch clients with long documents.

Two P0 and two P1 conversations a second take about half of the mock GPU. Four P2 clients always have another
prompt of 32,768 tokens, each of which holds everybody's next token up for two seconds.
"""

from gateway.policy.request import Priority
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Caller,
    ClosedStream,
    FixedLengths,
    Lengths,
    PoissonStream,
    Workload,
)

PRESET = "seed_32k"
CONVERSATIONS_PER_SECOND = 2.0
"""Of each class."""
DOCUMENT = Lengths(32_768, 128)
BATCH_CLIENTS = 4
BATCH_FROM_PART = 0.1
"""Of the time: by then conversations are under way."""


def mixed_load(seconds: float) -> Workload:
    return Workload(
        open=(
            PoissonStream(Caller(Priority.P0, "realtime"), CONVERSATIONS_PER_SECOND, CHAT_LENGTHS),
            PoissonStream(Caller(Priority.P1, "normal"), CONVERSATIONS_PER_SECOND, CHAT_LENGTHS),
        ),
        closed=(
            ClosedStream(
                Caller(Priority.P2, "batch"),
                BATCH_CLIENTS,
                FixedLengths(DOCUMENT),
                from_seconds=BATCH_FROM_PART * seconds,
            ),
        ),
    )
