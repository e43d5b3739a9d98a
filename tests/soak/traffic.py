"""What the clients of a soak run do, what the engine does to them, and which endings may come of it.

Each request carries its plan in the header `x-soak-plan`, which the gateway passes on: so the engine knows
how to treat it, and nothing else has to be agreed.
"""

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.raw_client import post, request_head

PLAN_HEADER = "x-soak-plan"
MODEL = "soak"

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
STREAMED_PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

KEYS: dict[str, dict[str, Any]] = {
    "soak-key-a": {"tenant": "a"},
    "soak-key-b": {"tenant": "b"},
    "soak-key-c": {"tenant": "c", "ceiling": "P1"},
    "soak-key-small": {"tenant": "small", "requests_per_minute": 20, "max_in_flight": 2},
}
FREE_KEYS = ("soak-key-a", "soak-key-b", "soak-key-c")
SMALL_KEY, WRONG_KEY = "soak-key-small", "soak-key-of-nobody"

WRITE_IDLE_SECONDS = 2.5
"""After which the gateway drops a reader that takes nothing."""
MEGABYTE = 1 << 20
SLOW_BYTES, STALLED_BYTES, HUGE_EVENT_BYTES = 3 * MEGABYTE, 24 * MEGABYTE, 2 * MEGABYTE


@dataclass(frozen=True, slots=True)
class Kind:
    """`weight`: how often, of all together. `endings`: log outcome → statuses that the client may have seen;
    what any request may meet (`OVERLOAD`, or an engine that is being restarted) comes on top."""

    weight: float
    endings: dict[str, set[int]]
    streams: bool | None = None
    """None: now one, now the other."""
    embeddings: bool = False
    """Whether a request for embeddings may be of this kind."""


DONE_WELL = {"completed": {200}}
GONE = {"client_gone_queued": {499}, "client_gone_streaming": {499, 200}, "completed": {200}}
REFUSED, ABORTED = {"upstream_refused": {502}}, {"upstream_aborted": {200}}

KINDS: dict[str, Kind] = {
    "plain": Kind(30, DONE_WELL, streams=False, embeddings=True),
    "stream": Kind(34, DONE_WELL, streams=True),
    # clients
    "leaves at once": Kind(5, GONE),
    "leaves in the stream": Kind(7, GONE, streams=True),
    "leaves in the upload": Kind(1, {"client_gone_queued": {499}}),
    "reads slowly": Kind(0.6, DONE_WELL, streams=True),
    "reads nothing": Kind(0.2, {"client_stalled": {200}}, streams=True),
    "bad body": Kind(3, {"bad_request": {400}}, embeddings=True),
    "wrong key": Kind(2, {"unauthorized": {401}}, embeddings=True),
    "wrong model": Kind(1, {"not_found": {404}}),
    "wrong path": Kind(1, {"not_found": {404}}),
    "small tenant": Kind(3, DONE_WELL | {"rejected_rate": {429}}, embeddings=True),
    # engines
    "reset before the head": Kind(1.2, REFUSED, embeddings=True),
    "reset behind the head": Kind(1, REFUSED | ABORTED),
    "reset in the stream": Kind(1.5, ABORTED, streams=True),
    "silent before the head": Kind(0.3, {"upstream_timeout": {504}}),
    "silent in the stream": Kind(0.3, ABORTED, streams=True),
    "error 500": Kind(1.2, {"upstream_error": {500}}, embeddings=True),
    "full": Kind(0.8, {"upstream_error": {503}}, embeddings=True),
    "full once": Kind(0.8, DONE_WELL | {"upstream_error": {503}}),
    "error event": Kind(0.8, {"upstream_error": {200}}, streams=True),
    "less than it says": Kind(0.8, REFUSED, streams=False),
    "more than it says": Kind(0.8, DONE_WELL, streams=False),
    "no JSON": Kind(0.6, REFUSED, streams=False),
    "huge event": Kind(0.3, DONE_WELL, streams=True),
}

OVERLOAD = {"rejected_queue_full": {429}, "queue_timeout": {429}}
"""What may become of any request that came as far as the queues."""
OF_AN_OUTAGE = {
    "upstream_refused": {502},
    "upstream_aborted": {200},
    "upstream_timeout": {504},
    "rejected_no_upstream": {503},
}
"""What may become of a request whose engine is killed, or is not there."""
AT_THE_DOOR = {"bad body", "wrong key", "wrong model", "wrong path", "leaves in the upload"}
"""These never come to a queue."""
CUT_SHORT = {"reset behind the head", "reset in the stream", "silent in the stream", "error event"}
"""Streams of which the engine never says what was used."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. Tokens are what the engine will say that it used; `pause_ms` is its time per token."""

    id: str
    kind: str
    path: str
    stream: bool
    prompt: int
    completion: int
    cached: int
    pause_ms: float

    @property
    def header(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def read(cls, header: str) -> "Plan":
        return cls(**json.loads(header))

    @property
    def words(self) -> list[str]:
        """The answer; it begins with the id, so that a client can tell its own from another's."""
        return [self.id, *(f" w{number}" for number in range(1, self.completion))]


class Plans:
    """An endless mixture, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made = 0

    def next(self) -> Plan:
        chance = self._random
        kind = chance.choices(list(KINDS), [each.weight for each in KINDS.values()])[0]
        rules = KINDS[kind]
        self._made += 1
        prompt = chance.choices((chance.randint(5, 1200), chance.randint(8_500, 9_500)), (99.5, 0.5))[0]
        stream = chance.random() < 0.5 if rules.streams is None else rules.streams
        paths = STREAMED_PATHS if stream or not rules.embeddings else (*STREAMED_PATHS, EMBEDDINGS)
        path = chance.choice(paths)
        return Plan(
            id=f"soak-{self._made:07}-{chance.randrange(16**6):06x}",
            kind=kind,
            path=path,
            stream=stream,
            prompt=prompt,
            completion=0 if path == EMBEDDINGS else chance.randint(4, 30),
            cached=0 if path == EMBEDDINGS else chance.choice((0, 0, chance.randint(0, prompt))),
            pause_ms=chance.choice((0.0, 5.0, 15.0)),
        )

    def key(self, plan: Plan) -> str:
        if plan.kind in ("wrong key", "small tenant"):
            return WRONG_KEY if plan.kind == "wrong key" else SMALL_KEY
        return self._random.choice(FREE_KEYS)

    def priority(self) -> str:
        return self._random.choices(("P0", "P1", "P2"), (40, 40, 20))[0]

    def headers(self, plan: Plan, key: str, priority: str) -> list[tuple[str, str]]:
        return [
            ("authorization", f"Bearer {key}"),
            ("x-request-priority", priority),
            ("x-request-id", plan.id),
            (PLAN_HEADER, plan.header),
        ]

    def request(self, plan: Plan) -> bytes:
        """The bytes that the client sends."""
        headers = self.headers(plan, self.key(plan), self.priority())
        if plan.kind == "leaves in the upload":
            return request_head("POST", plan.path, [*headers, ("content-length", "1000")]) + b'{"model":'
        path = "/v9/nothing" if plan.kind == "wrong path" else plan.path
        return post(path, self._body(plan), headers)

    def _body(self, plan: Plan) -> bytes:
        if plan.kind == "bad body":
            whole = json.dumps(body_of(plan)).encode()
            return self._random.choice((b"", b"nonsense", whole[:-1], b"[" * 200 + whole, b"\xff" + whole))
        body = body_of(plan)
        if plan.kind == "wrong model":
            body["model"] = f"no-model-{self._random.randrange(10**9)}"
        return json.dumps(body).encode()


def body_of(plan: Plan) -> dict[str, Any]:
    text = "word " * plan.prompt
    limit = self_limit(plan)
    match plan.path:
        case "/v1/completions":
            return {"model": MODEL, "prompt": text, "stream": plan.stream, **limit}
        case "/v1/embeddings":
            return {"model": MODEL, "input": text}
        case "/v1/responses":
            return {"model": MODEL, "input": text, "stream": plan.stream, **limit}
        case _:
            messages = [{"role": "user", "content": text}]
            return {"model": MODEL, "messages": messages, "stream": plan.stream, **limit}


def self_limit(plan: Plan) -> dict[str, int]:
    """Every second request says how long its answer may be."""
    if plan.prompt % 2 and plan.path != MESSAGES:
        return {}
    return {"max_output_tokens" if plan.path == RESPONSES else "max_tokens": plan.completion + 10}


def may_end(plan: Plan, outcome: str, status: int | None, in_outage: bool) -> bool:
    """Whether a request of this plan may have this outcome in the log and have shown this status (None: its
    client did not wait for one)."""
    allowed = dict(KINDS[plan.kind].endings)
    if plan.kind not in AT_THE_DOOR:
        allowed |= OVERLOAD
        if in_outage:
            allowed = {
                name: allowed.get(name, set()) | OF_AN_OUTAGE.get(name, set())
                for name in allowed | OF_AN_OUTAGE
            }
    return outcome in allowed and (status is None or status in allowed[outcome])
