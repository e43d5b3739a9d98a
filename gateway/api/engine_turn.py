"""An engine's part of an exchange: asked, answered, relayed, and what it delivered.

A turn begins with a place (`permit`), or without one for what costs an engine next to nothing. It keeps the
open response and the stream's observer, so that whoever ends the exchange knows what to close and to charge.
"""

from typing import TYPE_CHECKING

from starlette.types import Scope

from gateway.api.audio_form import duration_usage
from gateway.api.body import BodyFacts
from gateway.api.client_upload import ClientUpload
from gateway.api.endpoints import Endpoint
from gateway.api.engine_call import ENGINE_IS_FULL, NotReached, ask, body_for, is_broken_json, read_all
from gateway.api.errors import Problem
from gateway.api.headers import STREAM_HEADERS, Header, for_client, for_upstream, without_credentials
from gateway.api.reply import Reply
from gateway.policy.admission import NOTHING_DELIVERED, Delivered
from gateway.policy.outcome import Outcome
from gateway.policy.request import Usage
from gateway.runtime.admission_gate import Permit, Refused
from gateway.telemetry.tracing_context import Trace
from gateway.upstream.client import Response, Upstream
from gateway.upstream.errors import UpstreamError
from gateway.upstream.relay import StreamEnd, relay_stream
from gateway.upstream.stream_observer import StreamObserver
from gateway.upstream.upload import StreamedBody
from gateway.upstream.usage import inspect_answer

if TYPE_CHECKING:
    from gateway.api.edge import Edge

PLAIN_ANSWER_BYTES_MAX = 64 * 1024 * 1024
ERROR_ANSWER_BYTES_MAX = 4 * 1024 * 1024


class StreamProgress:
    """How far a stream has come, for the control loop to look at now and then."""

    __slots__ = ("_observer", "_reply")

    def __init__(self, observer: StreamObserver, reply: Reply) -> None:
        self._observer = observer
        self._reply = reply

    @property
    def last_token_at(self) -> int | None:
        return self._observer.last_token_at

    @property
    def output_tokens_seen(self) -> int:
        return self._observer.output_tokens_seen

    @property
    def held_up(self) -> bool:
        """What is there for the client is not taken."""
        return self._reply.writing_since is not None


class EngineTurn:
    """`upstream_id` names the request to engines; `trace` is there where tracing is on."""

    def __init__(
        self,
        edge: "Edge",
        endpoint: Endpoint,
        scope: Scope,
        reply: Reply,
        upstream_id: bytes,
        trace: Trace | None = None,
    ) -> None:
        self._edge = edge
        self._endpoint = endpoint
        self._scope = scope
        self._reply = reply
        self._upstream_id = upstream_id
        self._trace = trace
        self.permit: Permit | None = None
        self.observer: StreamObserver | None = None
        self._response: Response | None = None
        self._upload: ClientUpload | None = None
        self.reply_is_unfinished = False  # all of it is written, to a client that still sends its request
        self._used: Usage | None = None  # by a plain answer that is whole

    # ------------------------------------------------------------------ a budgeted request

    async def serve(
        self, body: bytes | ClientUpload, facts: BodyFacts, permit: Permit
    ) -> tuple[Outcome, Delivered]:
        """With the place it has got, to the last byte. Raises Problem, also after the answer has begun."""
        asks_for_usage = self._endpoint.tells_usage_if_asked and facts.stream and not facts.include_usage
        response, permit = await self._answer_to(permit, body, facts, asks_for_usage)
        headers = response.lower_headers()
        if not 200 <= response.status < 300:
            await self._answer_whole(response, headers, await read_all(response, ERROR_ANSWER_BYTES_MAX))
            return Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED
        kind = _header(headers, b"content-type")
        may_stream = facts.stream or self._endpoint.takes_form  # whose `stream` may come last of all
        if may_stream and kind.startswith(b"text/event-stream"):
            return await self._stream(response, headers, facts, asks_for_usage, permit)
        if self._endpoint.answers_bytes and b"json" not in kind:
            return await self._bytes(response, headers, permit)
        return await self._plain(response, headers, facts, permit)

    async def _answer_to(
        self, permit: Permit, body: bytes | ClientUpload, facts: BodyFacts, asks_for_usage: bool
    ) -> tuple[Response, Permit]:
        """The head of an engine's answer, and the place it came from. A request of which its engine has begun
        nothing is sent once more: where there was no room later, where it was not reached to another. An
        upload of which something has gone is not, for that is not kept."""
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
            is_gone = isinstance(body, ClientUpload) and body.consumed
            if response.status != ENGINE_IS_FULL or is_gone or not edge.admission.may_requeue(permit.ticket):
                return response, permit
            await read_all(response, ERROR_ANSWER_BYTES_MAX)
            if not edge.admission.may_requeue(permit.ticket):  # a reload came while the answer did
                message = "no engine has room for this any longer"
                raise Problem(Outcome.REJECTED_NO_UPSTREAM, message, retry_seconds=edge.probe_seconds)
            permit = await self._requeue(permit, reached=True)
        return await self._dispatch(permit, body, facts, asks_for_usage), permit

    async def _dispatch(
        self, permit: Permit, body: bytes | ClientUpload, facts: BodyFacts, asks_for_usage: bool
    ) -> Response:
        upstream = self._edge.engines.of(permit.engine).upstream
        if isinstance(body, ClientUpload):
            self._upload = body
            self._response = await self.ask(upstream, b"POST", body.body(), body.content_type)
            return self._response
        body = body_for(upstream, body, facts, permit.ticket.priority, asks_for_usage)
        self._response = await self.ask(upstream, b"POST", body)
        return self._response

    async def _requeue(self, permit: Permit, *, reached: bool) -> Permit:
        """The engine has taken nothing of it: back into the queue, for this or another engine. Raises Problem
        where there is no place in time."""
        self.permit = self._response = None
        try:
            self.permit = await self._edge.gate.requeue(permit, reached=reached)
        except Refused as refused:
            raise self._edge.problem_of(refused.refusal, permit.ticket.priority) from None
        return self.permit

    async def _plain(
        self, response: Response, headers: list[Header], facts: BodyFacts, permit: Permit
    ) -> tuple[Outcome, Delivered]:
        body = await read_all(response, PLAIN_ANSWER_BYTES_MAX)
        valid, usage, failed = inspect_answer(body)
        if usage is None and self._endpoint.takes_form:
            usage = duration_usage(body, permit.ticket.output_reserve)
        if not valid and (self._endpoint.has_known_answers or is_broken_json(body, headers)):
            raise Problem(Outcome.UPSTREAM_REFUSED, "the engine's answer is not a JSON object")
        ticket = permit.ticket  # where the engine does not tell, the estimate stands
        self._used = usage or Usage(ticket.input_tokens, 0 if failed else ticket.output_reserve)
        await self._answer_whole(response, headers, body)
        if failed:
            return Outcome.UPSTREAM_ERROR, Delivered(self._used)
        if usage is not None:
            self._learn(facts, usage)
        return Outcome.COMPLETED, Delivered(self._used)

    async def _bytes(
        self, response: Response, headers: list[Header], permit: Permit
    ) -> tuple[Outcome, Delivered]:
        """Sound, or whatever is no JSON: passed on as it comes. It tells no usage, and half of it is no less
        work that nobody can count: from its first byte on it costs what was reserved."""
        self._used = Usage(permit.ticket.input_tokens, permit.ticket.output_reserve)
        await self._reply.start(response.status, for_client(headers))
        try:
            while piece := await response.read():
                await self._reply.write(piece)
        except UpstreamError as error:
            raise Problem(
                Outcome.UPSTREAM_ABORTED, f"the engine's answer broke off: {error.message}"
            ) from error
        await self._reply.finish()
        return Outcome.COMPLETED, Delivered(self._used)

    async def _stream(
        self,
        response: Response,
        headers: list[Header],
        facts: BodyFacts,
        strip_usage: bool,
        permit: Permit,
    ) -> tuple[Outcome, Delivered]:
        observer = self.observer = StreamObserver(
            self._endpoint.stream_dialect, strip_usage, lambda: self._edge.first_token(permit)
        )
        permit.ticket.progress = StreamProgress(observer, self._reply)
        names = {name for name, _ in STREAM_HEADERS}
        kept = [header for header in for_client(headers) if header[0] not in names]
        await self._reply.start(response.status, [*kept, *STREAM_HEADERS])
        end = await relay_stream(
            response,
            observer,
            self._reply,
            self._edge.clock,
            needs_end_mark=self._endpoint.has_known_answers,
        )
        if end is StreamEnd.BROKEN_OFF or end is StreamEnd.SILENT:
            what = "fell silent" if end is StreamEnd.SILENT else "broke off"
            raise Problem(Outcome.UPSTREAM_ABORTED, f"the engine's stream {what}")
        await self._reply.finish()
        delivered = self.delivered()
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

    # ------------------------------------------------------------------ any request

    async def untouched(
        self, upstream: Upstream, method: bytes, body: bytes = b""
    ) -> tuple[Outcome, Delivered]:
        """One engine's answer, whatever it is, to a request without a place."""
        response = self._response = await self.ask(upstream, method, body)
        answer = await read_all(response, PLAIN_ANSWER_BYTES_MAX)
        await self._answer_whole(response, response.lower_headers(), answer)
        ok = 200 <= response.status < 300
        return Outcome.COMPLETED if ok else Outcome.UPSTREAM_ERROR, NOTHING_DELIVERED

    async def ask(
        self,
        upstream: Upstream,
        method: bytes,
        body: bytes | StreamedBody = b"",
        content_type: bytes = b"application/json",
    ) -> Response:
        """The client's request, as this engine gets it. Raises Problem."""
        trace, dropped = self._trace, self._edge.priority_headers
        headers = for_upstream(
            self._scope["headers"],
            also_dropped=dropped if trace is None else dropped | trace.replaces,
            request_id=self._upstream_id,
            credential=upstream.address.credential,
        )
        if body:
            headers.append((b"content-type", content_type))
        query = without_credentials(self._scope["query_string"])
        target = self._endpoint.path.encode() + (b"?" + query if query else b"")
        if trace is None:
            return await ask(upstream, method, target, headers, body)
        call, header = trace.call(upstream.name, upstream.address.url, self._edge.clock.now())
        headers.append(header)
        response = await ask(upstream, method, target, headers, body)
        call.status = response.status
        return response

    async def _answer_whole(self, response: Response, headers: list[Header], body: bytes) -> None:
        kept = for_client(headers)
        if response.status >= 400:
            kept.append((b"x-qos-error-source", b"upstream"))
        if self._upload is not None and not self._upload.complete:
            self.reply_is_unfinished = True
            await self._reply.unfinished(response.status, kept, body)
            return
        await self._reply.whole(response.status, kept, body)

    # ------------------------------------------------------------------ how far it has come

    @property
    def status(self) -> int | None:
        """The engine's, None before it has told one."""
        return None if self._response is None else self._response.status

    def is_heard(self, engine: tuple[str, str], since: int) -> bool:
        """Whether a token of its stream has come from this engine (name, address) since then (ns)."""
        if self.observer is None or self.permit is None or self.permit.engine != engine:
            return False
        return self.observer.last_token_at is not None and self.observer.last_token_at >= since

    def delivered(self, *, we_left: bool = False) -> Delivered:
        """What a plain answer or a stream has produced up to now; nothing if the engine never began. One that
        `we_left` while it was at work is taken to have read the prompt."""
        if self._used is not None:
            return Delivered(self._used)
        if self.permit is None:
            return NOTHING_DELIVERED
        ask, observer = self.permit.ticket.ask, self.observer
        if observer is None:
            has_begun = self._upload is None or self._upload.handed_on
            return Delivered(Usage(ask.input_tokens, 0)) if we_left and has_begun else NOTHING_DELIVERED
        usage = observer.usage
        produced = observer.output_tokens_seen
        return Delivered(
            Usage(usage.input_tokens, produced, usage.cached_tokens)
            if usage and usage.input_tokens  # some engines begin a message with 0, before they have counted
            else Usage(ask.input_tokens, produced),
            observer.last_token_at,
            observer.max_gap_ns,
        )

    def close(self) -> None:
        """Let go of the engine. Repeating it changes nothing."""
        if self._response is not None:
            self._response.abort()


def _header(headers: list[Header], name: bytes) -> bytes:
    return next((value.strip().lower() for key, value in headers if key == name), b"")
