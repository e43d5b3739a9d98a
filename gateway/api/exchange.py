"""One request from its arrival to its one ending.

    body → facts → class → place (waits here) → engine → relay → settle

Whatever ends it, the same few lines at the end of `run` close what is open: the engine's connection, the
lease with its tokens, the record. A client that leaves, a reader that stalls and a shutdown all come as a
cancellation of the one task, with the reason noted beforehand.
"""

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from gateway.api.access import Caller
from gateway.api.body import INPUT_FIELDS, BodyFacts
from gateway.api.channel import channel_of
from gateway.api.client_upload import ClientUpload
from gateway.api.endpoints import Endpoint, Use
from gateway.api.engine_turn import EngineTurn
from gateway.api.errors import Problem
from gateway.api.headers import Header
from gateway.api.help_calls import list_models, pass_on
from gateway.api.models import check_is_served, check_may_use
from gateway.api.reply import Reply
from gateway.api.request_body import ClientLeft, receive_body
from gateway.api.request_facts import (
    build_ask,
    classify_request,
    client_request_id,
    default_class,
    retry_count,
)
from gateway.policy.admission import NOTHING_DELIVERED, Delivered, RequestTooLong
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.outcome import Outcome
from gateway.policy.request import Ask
from gateway.runtime.admission_gate import Permit, Refused
from gateway.telemetry.tracing_context import Trace, TracedId

if TYPE_CHECKING:
    from gateway.api.edge import Edge

LINGER_SECONDS = 10.0
LINGER_SILENCE_SECONDS = 1.0
"""A client that is refused in the middle of its upload is listened to for so long, and while it sends."""
NANOSECONDS_PER_MILLISECOND = NANOSECONDS_PER_SECOND // 1000


class Interrupt(Enum):
    """Why the gateway itself breaks an exchange off."""

    CLIENT_GONE = "client gone"
    CLIENT_STALLED = "client stalled"
    BAD_UPLOAD = "bad upload"
    SHUTDOWN = "shutdown"


class Exchange:
    def __init__(self, edge: "Edge", endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._edge = edge
        self._endpoint = endpoint
        self._scope = scope
        self._receive = receive
        told = edge.door_headers
        self._headers: list[Header] = [header for header in scope["headers"] if header[0] in told]
        self._channel = channel_of(scope, receive, send)
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self._interrupt: Interrupt | None = None
        self.arrived_at = edge.clock.now()
        given_id = client_request_id(self._headers)
        self.request_id = given_id or edge.new_request_id()
        self._trace: Trace | None = None
        if edge.tracing is not None:
            method, path = scope["method"], endpoint.path
            self._trace = edge.tracing.begin(self._headers, method, path, self.arrived_at)
            self.request_id = TracedId(self.request_id, self._trace)
        self.tenant = ""
        self.priority = edge.rules.default
        self._complete_at = self.arrived_at  # when the whole request was here
        self._model = ""
        self._asked_at: int | None = None  # when the policy was asked
        self.ask: Ask | None = None
        self._taking_in: asyncio.Task[None] | None = None
        self._upload: ClientUpload | None = None
        self._upload_is_unread = False
        self.reply = Reply(self._channel, scope["method"], edge.clock, self._common_headers, endpoint.errors)
        upstream_id = edge.upstream_request_id(given_id, self.request_id)
        self.turn = EngineTurn(edge, endpoint, scope, self.reply, upstream_id, self._trace)

    # ------------------------------------------------------------------ the whole

    async def run(self) -> None:
        self._edge.active.add(self)
        outcome = Outcome.INTERNAL_ERROR
        delivered = NOTHING_DELIVERED
        try:
            outcome, delivered = await self._serve()
        except Problem as problem:
            outcome, delivered = problem.outcome, self.turn.delivered()
            await self._tell(problem)
        except ClientLeft:
            outcome = Outcome.CLIENT_GONE_QUEUED
        except asyncio.CancelledError:
            if self._interrupt is None or self.task is None:
                raise
            self.task.uncancel()
            outcome = self._outcome_of(self._interrupt)
            delivered = self.turn.delivered(we_left=True)
            if self._interrupt is Interrupt.BAD_UPLOAD and self._upload and self._upload.fault:
                outcome = self._upload.fault.outcome
                await self._tell(self._upload.fault)
            elif self._interrupt is Interrupt.SHUTDOWN:
                await self._tell(Problem(Outcome.REJECTED_DRAINING, "the gateway is shutting down"))
            elif self._interrupt is Interrupt.CLIENT_STALLED:
                self.reply.cut()
        except Exception:
            self._edge.log_internal_error(self.request_id)
            delivered = self.turn.delivered()
            await self._tell(Problem(Outcome.INTERNAL_ERROR, "something went wrong inside the gateway"))
        finally:
            self._close(outcome, delivered)
        if self._upload_is_unread or self.turn.reply_is_unfinished:
            await self._let_upload_end()
            await self.reply.finish()
        self.reply.close()

    def interrupt(self, reason: Interrupt) -> None:
        """Break the exchange off; the first reason counts."""
        if self._interrupt is None and self.task is not None:
            self._interrupt = reason
            self.task.cancel()

    def _close(self, outcome: Outcome, delivered: Delivered) -> None:
        self._edge.active.discard(self)
        self.task = None
        self._channel.unwatch()
        if self._taking_in is not None:
            self._taking_in.cancel()
        self.turn.close()
        permit = self.turn.permit
        if permit is None and self.ask is not None:
            return  # the policy ended it itself, and has told
        if self.reply.status is not None:
            self._edge.request_log.answered(self.request_id, self.reply.status)
            if self._trace is not None:
                self._trace.status = self.reply.status
        if permit is not None:
            self._edge.ended_at_engine(permit, outcome, self.turn.status)
            permit.finish(outcome, delivered)
        else:
            self._edge.ended_at_the_door(self, outcome)

    def _outcome_of(self, interrupt: Interrupt) -> Outcome:
        if interrupt is Interrupt.CLIENT_STALLED:
            return Outcome.CLIENT_STALLED
        observer = self.turn.observer
        if observer is not None and observer.error is not None:
            return Outcome.UPSTREAM_ERROR  # which the client has read, and hung up
        if observer is not None and observer.done:
            return Outcome.COMPLETED  # an SDK that hangs up after the end mark has all it wanted
        if interrupt is Interrupt.SHUTDOWN:
            return Outcome.REJECTED_DRAINING
        return Outcome.CLIENT_GONE_QUEUED if self.turn.permit is None else Outcome.CLIENT_GONE_STREAMING

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
            self._watch_client()
            return await list_models(edge, self.turn, self.reply, caller)
        body: bytes | ClientUpload
        if self._endpoint.takes_form:
            body = self._upload = ClientUpload(self._scope, self._receive, edge.body_limits)
            facts = await body.facts()
            self._complete_at = edge.clock.now()
            return await self._serve_paid(caller, body, facts, body.queue_bytes)
        body = await receive_body(self._headers, self._channel, self._receive, edge.body_limits)
        self._complete_at = edge.clock.now()
        if not self._endpoint.is_budgeted(self._scope["method"]):
            self._model = await edge.prompt_reader.read_model(body) or ""
            self._watch_client()
            return await pass_on(edge, self.turn, caller, self._model, self._scope["method"], body)
        facts = await edge.prompt_reader.read(body, self._endpoint)
        return await self._serve_paid(caller, body, facts, len(body))

    async def _serve_paid(
        self, caller: Caller, body: bytes | ClientUpload, facts: BodyFacts, body_bytes: int
    ) -> tuple[Outcome, Delivered]:
        """A request that needs a budget and a place."""
        edge = self._edge
        self._model = facts.model
        check_may_use(caller, facts.model)
        classified = classify_request(
            self._headers, edge.priority_headers, facts, self._endpoint, caller, edge.rules
        )
        self.priority = classified.granted
        edge.metrics.class_claimed(classified.claimed, classified.granted)
        if retry_count(self._headers):
            edge.metrics.client_retried()
        ask = build_ask(self.request_id, facts, classified, caller, body_bytes, self._headers, edge.admission)
        permit = self.turn.permit = await self._place(ask)
        taken = edge.clock.now() - self._complete_at
        edge.metrics.proxy_overhead(taken - (permit.ticket.queue_wait_ns or 0))
        return await self.turn.serve(body, facts, permit)

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
        self._watch_client()
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

    def _watch_client(self) -> None:
        """From now on the client's leaving breaks the exchange off."""
        if self._upload is None:
            self._channel.watch(self._client_left)
        else:
            self._taking_in = asyncio.ensure_future(self._take_in(self._upload))

    def _client_left(self) -> None:
        self.interrupt(Interrupt.CLIENT_GONE)

    async def _take_in(self, upload: ClientUpload) -> None:
        """The rest of the body. Where it cannot be whole, a request that waits for its place is told when its
        turn comes, as all that is decided about it is."""
        try:
            await upload.take_in()
            self._channel.watch(self._client_left)
        except ClientLeft:
            self._client_left()
        except Exception as error:
            if not isinstance(error, Problem):
                self._edge.log_internal_error(self.request_id)
                error = Problem(Outcome.INTERNAL_ERROR, "something went wrong inside the gateway", close=True)
            upload.fault = error
            if self.turn.permit is not None:
                self.interrupt(Interrupt.BAD_UPLOAD)

    # ------------------------------------------------------------------ to the client

    async def _tell(self, problem: Problem) -> None:
        """The gateway's own word instead of an answer: a response, or one event if a stream has begun."""
        try:
            if not self.reply.started:
                problem.close |= self._upload is not None and not self._upload.complete
                self._upload_is_unread = problem.close
                await self.reply.problem(problem, self._edge.random)
            elif (observer := self.turn.observer) is not None:
                await self.reply.error_event(problem, observer.next_number, observer.mid_event)
        except asyncio.CancelledError:
            if self._interrupt is None or self.task is None:
                raise
            self.task.uncancel()
            if self._interrupt is Interrupt.CLIENT_STALLED:
                self.reply.cut()

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
        if self.turn.permit is not None:
            return self.turn.permit.ticket.queue_wait_ns or 0
        return 0 if self._asked_at is None else self._edge.clock.now() - self._asked_at
