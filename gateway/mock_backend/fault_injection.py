"""Between the server and the mock: which request is struck by which fault. An ASGI application.

A fault named by the request itself comes first, then one drawn from the table, which `POST /faults` replaces.
Both header and `/faults` work only in a mock that was started so. Faults are drawn for calls of the API and
for probes of `/health`, each from a row of random numbers of its own, so that the hour of a probe does not
decide what strikes the next request.
"""

import random
from collections import Counter
from collections.abc import Callable

import msgspec

from .app import MockGpuApp
from .asgi import Message, Receive, Send, read_body, respond
from .faults import PROBE_KINDS, Fault, FaultKind, FaultOptions, FaultTable, decode_table, parse_fault
from .faulty_answers import CARRIED_OUT, Exchange
from .generation_tasks import GENERATION_TASKS
from .pooling_answers import POOLING_TASKS
from .request_errors import RequestError
from .token_calls import TOKEN_CALLS

FAULT_HEADER = "x-mock-fault"
FAULTS_PATH = "/faults"
HEALTH_PATH = "/health"
CALLS = frozenset({*GENERATION_TASKS, *POOLING_TASKS, *TOKEN_CALLS})


class FaultInjector:
    def __init__(
        self, app: MockGpuApp, options: FaultOptions, stop_listening: Callable[[float], None]
    ) -> None:
        """`stop_listening` has the server refuse connections for so many seconds."""
        self._app = app
        self._stop_listening = stop_listening
        self._allowed = options.allowed
        self._table = options.table
        self._struck: Counter[FaultKind] = Counter()
        seed = random.randrange(2**32) if options.seed is None else options.seed
        self._rolls = {False: random.Random(f"requests {seed}"), True: random.Random(f"probes {seed}")}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["path"] == FAULTS_PATH and self._allowed:
                await self._administer(scope["method"], receive, send)
                return
            fault = self._named(scope) or self._drawn(scope["path"])
        except RequestError as error:
            await respond(send, error.status, error.body())
            return
        if fault is None:
            await self._app(scope, receive, send)
            return
        self._struck[fault.kind] += 1
        exchange = Exchange(self._app, self._stop_listening, scope, receive, send)
        await CARRIED_OUT[fault.kind](exchange, fault)
        await exchange.gone()

    def _named(self, scope: Message) -> Fault | None:
        """Raises RequestError for a fault that is none, or none of this path."""
        header = FAULT_HEADER.encode()
        named = [value.decode("latin-1") for name, value in scope["headers"] if name == header]
        if not named or not self._allowed:
            return None
        try:
            if len(named) > 1:
                raise ValueError("one request has one fault")
            fault = parse_fault(named[0])
            if fault.kind in PROBE_KINDS and scope["path"] != HEALTH_PATH:
                raise ValueError(f"{fault.kind} is a fault of {HEALTH_PATH}")
        except ValueError as error:
            raise _bad_fault(error, FAULT_HEADER) from error
        return fault

    def _drawn(self, path: str) -> Fault | None:
        probe = path == HEALTH_PATH
        if not probe and path not in CALLS:
            return None
        return self._table.draw(self._rolls[probe].random(), probe=probe)

    async def _administer(self, method: str, receive: Receive, send: Send) -> None:
        """GET tells the table and how often each kind has struck, POST replaces it, DELETE empties it."""
        if method not in ("GET", "POST", "DELETE"):
            await respond(send, 405, b'{"detail":"Method Not Allowed"}', [(b"allow", b"GET, POST, DELETE")])
            return
        body = await read_body(receive)
        if method == "POST":
            try:
                self._table = decode_table(body or b"")
            except ValueError as error:
                raise _bad_fault(error, "faults") from error
        elif method == "DELETE":
            self._table = FaultTable()
        told = {"faults": self._table.members(), "struck": dict(self._struck)}
        await respond(send, 200, msgspec.json.encode(told))


def _bad_fault(error: ValueError, param: str) -> RequestError:
    return RequestError(400, "BadRequestError", f"{param}: {error}", param)
