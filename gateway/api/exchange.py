"""One request from its arrival to its one ending.

    body → facts → class → place (waits here) → engine → relay → settle

Whatever ends it, the same few lines at the end of `run` close what is open: the engine's connection, the
lease with its tokens, the record. A client that leaves, a reader that stalls and a shutdown all come as a
cancellation of the one task, with the reason noted beforehand.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from gateway.api.access import Caller
from gateway.api.body import INPUT_FIELDS, BodyFacts
from gateway.api.endpoints import Endpoint, Use
from gateway.api.engine_call import ENGINE_IS_FULL, NotReached, body_for, is_broken_json, read_all
from gateway.api.engine_call import ask as ask_engine
from gateway.api.errors import Problem
from gateway.api.headers import STREAM_HEADERS, Header, for_client, for_upstream, without_credentials
from gateway.api.models import check_is_served, check_may_use, merged_models
from gateway.api.pass_on import engine_for
from gateway.api.prompt_reader import LARGE_BODY_BYTES
from gateway.api.reply import Reply
from gateway.api.request_body import ClientLeft, receive_body
from gateway.api.request_facts import (
    build_ask,
    classify_request,
    client_request_id,
    default_class,
    read_model,
    retry_count,
)
from gateway.policy.admission import NOTHING_DELIVERED, Delivered, RequestTooLong
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ask, Usage
from gateway.runtime.admission_gate import Permit, Refused
from gateway.upstream.client import Response, Upstream
from gateway.upstream.relay import StreamEnd, relay_stream
from gateway.upstream.stream_observer import StreamObserver
from gateway.upstream.usage import inspect_answer

if TYPE_CHECKING:
    from gateway.api.edge import Edge

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PLAIN_ANSWER_BYTES_MAX = 64 * 1024 * 1024
ERROR_ANSWER_BYTES_MAX = 4 * 1024 * 1024
LINGER_SECONDS = 10.0
LINGER_SILENCE_SECONDS = 1.0
"""A client that is refused in the middle of its upload is listened to for so long, and while it sends."""
NANOSECONDS_PER_MILLISECOND = NANOSECONDS_PER_SECOND // 1000


class Interrupt(Enum):
    """Why the gateway itself breaks an exchange off."""

    CLIENT_GONE = "client gone"
    CLIENT_STALLED = "client stalled"
    SHUTDOWN = "shutdown"


class Exchange:
    def __init__(self, edge: "Edge", endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge = edge
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        self._headers: list[Header] = scope["headers"]
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self._interrupt: Interrupt | None = None
        self.arrived_at = edge.clock.now()
        self.given_id = client_request_id(self._headers)
        self.request_id = self.given_id or edge.new_request_id()
        self.tenant = ""
        self.priority = edge.rules.default
        self._complete_at = self.arrived_at  # when the whole request was here
        self._model = ""
        self._asked_at: int | None = None  # when the policy was asked
        self.ask: Ask | None = None
        self._permit: Permit | None = None
        self._response: Response | None = None
        self._observer: StreamObserver | None = None
        self._used: Usage | None = None  # by a plain answer that is whole
        self._watch: asyncio.Task[None] | None = None
        self._upload_is_unread = False
        self.reply = Reply(scope, send, edge.clock, self._common_headers, endpoint.errors)

    # ------------------------------------------------------------------ the whole

    async def run(self) -> None:
        self._edge.active.add(self)
        outcome = Outcome.INTERNAL_ERROR
        delivered = NOTHING_DELIVERED
        try:
            outcome, delivered = await self._serve()
        except Problem as problem:
            outcome, delivered = problem.outcome, self._delivered_so_far()
            await self._tell(problem)
        except ClientLeft:
            outcome = Outcome.CLIENT_GONE_QUEUED
        except asyncio.CancelledError:
            if self._interrupt is None or self.task is None:
                raise
            self.task.uncancel()
            outcome = self._outcome_of(self._interrupt)
            delivered = self._delivered_so_far()
            if self._interrupt is Interrupt.SHUTDOWN:
                await self._tell(Problem(Outcome.REJECTED_DRAINING, "the gateway is shutting down"))
            elif self._interrupt is Interrupt.CLIENT_STALLED:
                self.reply.cut()
        except Exception:
            self._edge.log_internal_error(self.request_id)
            delivered = self._delivered_so_far()
            await self._tell(Problem(Outcome.INTERNAL_ERROR, "something went wrong inside the gateway"))
        finally:
            self._close(outcome, delivered)
        if self._upload_is_unread:
            await self._let_upload_end()
            await self.reply.finish()

    def interrupt(self, reason: Interrupt) -> None:
        """Break the exchange off; the first reason counts."""
        if self._interrupt is None and self.task is not None:
            self._interrupt = reason
            self.task.cancel()

    def _close(self, outcome: Outcome, delivered: Delivered) -> None:
        self._edge.active.discard(self)
        self.task = None
        if self._watch is not None:
            self._watch.cancel()
        if self._response is not None:
            self._response.abort()
        if self._permit is None and self.ask is not None:
            return  # the policy ended it itself, and has told
        if self.reply.status is not None:
            self._edge.request_log.answered(self.request_id, self.reply.status)
        if self._permit is not None:
            status = None if self._response is None else self._response.status
            self._edge.ended_at_engine(self._permit, outcome, status)
            self._permit.finish(outcome, delivered)
        else:
            self._edge.ended_at_the_door(self, outcome)

    def _outcome_of(self, interrupt: Interrupt) -> Outcome:
        if interrupt is Interrupt.CLIENT_STALLED:
            return Outcome.CLIENT_STALLED
        if self._observer is not None and self._observer.error is not None:
            return Outcome.UPSTREAM_ERROR  # which the client has read, and hung up
        if self._observer is not None and self._observer.done:
            return Outcome.COMPLETED  # an SDK that hangs up after the end mark has all it wanted
        if interrupt is Interrupt.SHUTDOWN:
            return Outcome.REJECTED_DRAINING
        return Outcome.CLIENT_GONE_QUEUED if self._permit is None else Outcome.CLIENT_GONE_STREAMING

    # ------------------------------------------------------------------ the way in

    async def _serve(self) -> tuple[Outcome, Delivered]:
        edge = self._edge
        self._check_address()
        caller = edge.access.caller(self._headers)
        self.tenant = caller.tenant
        self.priority = default_class(caller, edge.rules)
        if edge.admission.draining:
            raise Problem(Outcome.REJECTED_DRAINING, "the gateway is shutting down", close=True)
        if self._endpoint.use is Use.LIST_MODELS:
            return await self._list_models(caller)
        body = await receive_body(self._scope, self._receive, edge.body_limits)
        self._complete_at = edge.clock.now()
        if not self._endpoint.is_budgeted(self._scope["method"]):
            return await self._pass_on(body, caller)
        facts = await self._facts(body)
        self._model = facts.model
        check_may_use(caller, facts.model)
        classified = classify_request(
            self._headers, edge.priority_headers, facts, self._endpoint, caller, edge.rules
        )
        self.priority = classified.granted
        edge.metrics.class_claimed(classified.claimed, classified.granted)
        if retry_count(self._headers):
            edge.metrics.client_retried()
        ask = build_ask(self.request_id, facts, classified, caller, len(body), self._headers, edge.admission)
        self._permit = await self._place(ask)
        return await self._forward(body, facts, self._permit)

    async def _facts(self, body: bytes) -> BodyFacts:
        """What the body says."""
        return await self._edge.prompt_reader.read(body, self._endpoint)

    def _check_address(self) -> None:
        """Raises Problem for a path that leads nowhere (404) or a method it does not take (405)."""
        method, endpoint = self._scope["method"], self._endpoint
        if not endpoint.path:
            raise Problem(Outcome.NOT_FOUND, f"there is nothing at {self._scope['path'][:200]}", close=True)
        if method not in endpoint.methods:
            allowed = ", ".join(endpoint.methods)
            raise Problem(
                Outcome.BAD_REQUEST,
                f"{endpoint.path} takes {allowed}, not {method[:20]}",
                code="method_not_allowed",
                status=405,
                headers=((b"allow", allowed.encode()),),
                close=True,
            )

    async def _place(self, ask: Ask) -> Permit:
        """Wait for a place at an engine. Raises Problem where the policy says no."""
        check_is_served(ask.model, self._edge.admission)
        self._watch = asyncio.ensure_future(self._watch_client())
        try:
            self.ask = ask
            self._asked_at = self._edge.clock.now()
            return await self._edge.gate.acquire(ask)
        except Refused as refused:
            raise self._edge.problem_of(refused.refusal, ask.priority) from None
        except RequestTooLong as error:
            self.ask = None
            field = INPUT_FIELDS.get(self._endpoint.dialect or "")
            message = str(error) if field is None else f"{field}: {error}"
            raise Problem(Outcome.BAD_REQUEST, message, param=field, code="request_too_large") from None

    async def _watch_client(self) -> None:
        """Break off as soon as the client has left. Once the body is in, nothing else can be received."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.interrupt(Interrupt.CLIENT_GONE)

    # ------------------------------------------------------------------ to the engine and back

    async def _forward(self, body: bytes, facts: BodyFacts, permit: Permit) -> tuple[Outcome, Delivered]:
        edge = self._edge
        asks_for_usage = self._endpoint.tells_usage_if_asked and facts.stream and not facts.include_usage
        taken = edge.clock.now() - self._complete_at
        edge.metrics.proxy_overhead(taken - (permit.ticket.queue_wait_ns or 0))
        response, permit = await self._answer_to(permit, body, facts, asks_for_usage)
        headers = response.lower_headers()
        if not 200 <= response.status < 300:
            await self._answer_whole(response, headers, await read_all(response, ERROR_ANSWER_BYTES_MAX))
            return Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED
        if facts.stream and _header(headers, b"content-type").startswith(b"text/event-stream"):
            return await self._stream(response, headers, facts, asks_for_usage, permit)
        return await self._plain(response, headers, facts, permit)

    async def _answer_to(
        self, permit: Permit, body: bytes, facts: BodyFacts, asks_for_usage: bool
    ) -> tuple[Response, Permit]:
        """The head of an engine's answer, and the place it came from. A request of which its engine has begun
        nothing is sent once more: where there was no room later, where it was not reached to another."""
        edge = self._edge
        edge.retries.request()
        try:
            response = await self._dispatch(permit, body, facts, asks_for_usage)
        except NotReached as problem:
            if not edge.may_go_elsewhere(permit):
                raise
            edge.ended_at_engine(permit, problem.outcome, None)
            permit = await self._requeue(permit, reached=False)
        else:
            if response.status != ENGINE_IS_FULL or not edge.admission.may_requeue(permit.ticket):
                return response, permit
            await read_all(response, ERROR_ANSWER_BYTES_MAX)
            permit = await self._requeue(permit, reached=True)
        return await self._dispatch(permit, body, facts, asks_for_usage), permit

    async def _dispatch(
        self, permit: Permit, body: bytes, facts: BodyFacts, asks_for_usage: bool
    ) -> Response:
        upstream = self._edge.upstreams[permit.upstream]
        body = body_for(upstream, body, facts, self.priority, asks_for_usage)
        self._response = await self._ask_engine(upstream, b"POST", body)
        return self._response

    async def _requeue(self, permit: Permit, *, reached: bool) -> Permit:
        """The engine has taken nothing of it: back into the queue, for this or another engine. Raises Problem
        where there is no place in time."""
        self._permit = self._response = None
        try:
            self._permit = await self._edge.gate.requeue(permit, reached=reached)
        except Refused as refused:
            raise self._edge.problem_of(refused.refusal, permit.ticket.priority) from None
        return self._permit

    async def _ask_engine(self, upstream: Upstream, method: bytes, body: bytes = b"") -> Response:
        headers = for_upstream(
            self._headers,
            also_dropped=self._edge.priority_headers,
            request_id=self._edge.upstream_request_id(self),
            credential=upstream.address.credential,
        )
        if body:
            headers.append((b"content-type", b"application/json"))
        query = without_credentials(self._scope["query_string"])
        target = self._endpoint.path.encode() + (b"?" + query if query else b"")
        return await ask_engine(upstream, method, target, headers, body)

    async def _plain(
        self, response: Response, headers: list[Header], facts: BodyFacts, permit: Permit
    ) -> tuple[Outcome, Delivered]:
        body = await read_all(response, PLAIN_ANSWER_BYTES_MAX)
        valid, usage = inspect_answer(body)
        if not valid and (self._endpoint.has_known_answers or is_broken_json(body, headers)):
            raise Problem(Outcome.UPSTREAM_REFUSED, "the engine's answer is not a JSON object")
        ticket = permit.ticket  # where the engine does not tell, the estimate stands
        self._used = usage or Usage(ticket.input_tokens, ticket.output_reserve)
        await self._answer_whole(response, headers, body)
        if usage is not None:
            self._learn(facts, usage)
        return Outcome.COMPLETED, Delivered(self._used)

    async def _stream(
        self,
        response: Response,
        headers: list[Header],
        facts: BodyFacts,
        strip_usage: bool,
        permit: Permit,
    ) -> tuple[Outcome, Delivered]:
        observer = self._observer = StreamObserver(self._endpoint.stream_dialect, strip_usage)
        names = {name for name, _ in STREAM_HEADERS}
        kept = [header for header in for_client(headers) if header[0] not in names]
        await self.reply.start(response.status, [*kept, *STREAM_HEADERS])
        end = await relay_stream(
            response,
            observer,
            self.reply.write,
            lambda: self._edge.first_token(permit),
            self._edge.clock,
            needs_end_mark=self._endpoint.has_known_answers,
        )
        if end is StreamEnd.BROKEN_OFF or end is StreamEnd.SILENT:
            what = "fell silent" if end is StreamEnd.SILENT else "broke off"
            raise Problem(Outcome.UPSTREAM_ABORTED, f"the engine's stream {what}")
        await self.reply.finish()
        delivered = self._delivered_so_far()
        if end is StreamEnd.ERROR_EVENT:
            return Outcome.UPSTREAM_ERROR, delivered
        if observer.usage is not None and observer.usage.input_tokens:
            self._learn(facts, observer.usage)
        return Outcome.COMPLETED, delivered

    def _learn(self, facts: BodyFacts, told: Usage) -> None:
        """How many tokens this text was, by the engine's own word."""
        if not (facts.images or facts.audio_parts or facts.reads_more):
            estimator = self._edge.admission.input_estimator
            estimator.learn(facts.model, facts.text, told.input_tokens - facts.exact_tokens)

    def is_heard(self, upstream: str, since: int) -> bool:
        """Whether a token of its stream has come from this upstream since then (ns)."""
        if self._observer is None or self._permit is None or self._permit.upstream != upstream:
            return False
        return self._observer.last_token_at is not None and self._observer.last_token_at >= since

    def _delivered_so_far(self) -> Delivered:
        """What a plain answer or a stream has produced up to now; nothing if the engine never began."""
        if self._used is not None:
            return Delivered(self._used)
        observer, ask = self._observer, self.ask
        if observer is None or ask is None:
            if self._interrupt is not None and self._permit is not None and ask is not None:
                return Delivered(Usage(ask.input_tokens, 0))  # the engine was at work when we left
            return NOTHING_DELIVERED
        usage = observer.usage
        produced = observer.output_tokens_seen
        return Delivered(
            Usage(usage.input_tokens, produced, usage.cached_tokens)
            if usage and usage.input_tokens  # some engines begin a message with 0, before they have counted
            else Usage(ask.input_tokens, produced),
            observer.last_token_at,
            observer.max_gap_ns,
        )

    async def _pass_on(self, body: bytes, caller: Caller) -> tuple[Outcome, Delivered]:
        """A question that costs an engine next to nothing: asked at once, with neither bucket nor lease."""
        if len(body) < LARGE_BODY_BYTES:
            model = read_model(body)
        else:
            model = await asyncio.to_thread(read_model, body)
        if model is not None:
            self._model = model
            check_may_use(caller, model)
            check_is_served(model, self._edge.admission)
        self._watch = asyncio.ensure_future(self._watch_client())
        method = b"POST" if self._scope["method"] == "POST" else b"GET"  # the answer to HEAD is cut here
        return await self._untouched(engine_for(self._edge, caller, model), method, body)

    async def _list_models(self, caller: Caller) -> tuple[Outcome, Delivered]:
        """From the engines, with neither bucket nor lease: untouched where there is one and the key may
        use all, else put together."""
        self._watch = asyncio.ensure_future(self._watch_client())
        upstreams = self._edge.usable_upstreams()
        if not upstreams:
            raise Problem(Outcome.REJECTED_NO_UPSTREAM, "no engine is up")
        if len(upstreams) == 1 and "*" in caller.models:
            return await self._untouched(upstreams[0], b"GET")
        body = merged_models(await asyncio.gather(*map(self._model_page, upstreams)), caller)
        await self.reply.whole(200, [(b"content-type", b"application/json")], body)
        return Outcome.COMPLETED, NOTHING_DELIVERED

    async def _untouched(
        self, upstream: Upstream, method: bytes, body: bytes = b""
    ) -> tuple[Outcome, Delivered]:
        """One engine's answer, whatever it is."""
        response = self._response = await self._ask_engine(upstream, method, body)
        answer = await read_all(response, PLAIN_ANSWER_BYTES_MAX)
        await self._answer_whole(response, response.lower_headers(), answer)
        ok = 200 <= response.status < 300
        return Outcome.COMPLETED if ok else Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED

    async def _model_page(self, upstream: Upstream) -> bytes:
        """An engine's list; empty where it has none to give."""
        try:
            response = await self._ask_engine(upstream, b"GET")
            return await read_all(response, ERROR_ANSWER_BYTES_MAX)
        except Problem:
            return b""

    # ------------------------------------------------------------------ to the client

    async def _answer_whole(self, response: Response, headers: list[Header], body: bytes) -> None:
        kept = for_client(headers)
        if response.status >= 400:
            kept.append((b"x-qos-error-source", b"upstream"))
        await self.reply.whole(response.status, kept, body)

    async def _tell(self, problem: Problem) -> None:
        """The gateway's own word instead of an answer: a response, or one event if a stream has begun."""
        try:
            if not self.reply.started:
                self._upload_is_unread = problem.close
                await self.reply.problem(problem, self._edge.random)
            elif self._observer is not None:
                await self.reply.error_event(problem, self._observer.next_number, self._observer.mid_event)
        except asyncio.CancelledError:
            if self._interrupt is None or self.task is None:
                raise
            self.task.uncancel()

    async def _let_upload_end(self) -> None:
        """Take in and drop what the client still sends. To close a socket with unread input is to reset the
        connection, and with it goes the answer that the client has not read yet."""
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                more = True
                while more:
                    async with asyncio.timeout(LINGER_SILENCE_SECONDS):
                        more = (await self._receive()).get("more_body", False)
        except TimeoutError:
            pass

    def _common_headers(self) -> list[Header]:
        headers = [
            (b"x-request-id", self.request_id.encode()),
            (b"x-qos-priority", self.priority.name.encode()),
            (b"x-qos-queue-ms", b"%d" % (self._waited_ns() // NANOSECONDS_PER_MILLISECOND)),
        ]
        if self.tenant:  # what is left of a budget is nothing for strangers
            headers += self._edge.rate_limit_headers(self.priority, self._model, self.tenant)
        return headers

    def _waited_ns(self) -> int:
        """In the gateway's queues: until dispatch, or until now."""
        if self._permit is not None:
            return self._permit.ticket.queue_wait_ns or 0
        return 0 if self._asked_at is None else self._edge.clock.now() - self._asked_at


def _header(headers: list[Header], name: bytes) -> bytes:
    return next((value.strip().lower() for key, value in headers if key == name), b"")
