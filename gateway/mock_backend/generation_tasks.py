"""The endpoints that generate: how each reads its bodies and writes its answers."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from .messages_answers import StreamedMessage, whole_message
from .openai_answers import CHAT, COMPLETION, StreamedAnswer, whole_answer
from .openai_requests import Generation, parse_chat, parse_completion
from .responses_answers import StreamedResponse, whole_response
from .typed_requests import parse_message, parse_response


class AnswerStream(Protocol):
    """The events of one streamed answer, each as the bytes of one write."""

    def events_at_once(self) -> list[bytes]:
        """Sent while the prompt is still to be read."""
        ...

    def events_with_first_token(self) -> list[bytes]:
        """Sent just before it."""
        ...

    def token_event(self, choice: int, index: int, finished: bool) -> bytes: ...

    def closing_events(self) -> list[bytes]: ...


class GenerationTask(NamedTuple):
    """`parse` takes a body, the model and `max_model_len`; `stream` and `whole` take the call, the model and
    the request's id."""

    parse: Callable[[bytes, str, int], Generation]
    stream: Callable[[Generation, str, str], AnswerStream]
    whole: Callable[[Generation, str, str], bytes]


GENERATION_TASKS: dict[str, GenerationTask] = {
    "/v1/chat/completions": GenerationTask(
        parse_chat, partial(StreamedAnswer, CHAT), partial(whole_answer, CHAT)
    ),
    "/v1/completions": GenerationTask(
        parse_completion, partial(StreamedAnswer, COMPLETION), partial(whole_answer, COMPLETION)
    ),
    "/v1/responses": GenerationTask(parse_response, StreamedResponse, whole_response),
    "/v1/messages": GenerationTask(parse_message, StreamedMessage, whole_message),
}
