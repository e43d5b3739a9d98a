"""The engine that is measured: what it serves, and one streamed answer of it with the times of its tokens.

What is wrong with it is said in one sentence, as `EngineProblem`.
"""

import json
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from gateway.upstream.client import Response, Upstream, UpstreamAddress
from gateway.upstream.errors import UpstreamError
from gateway.upstream.stream_observer import StreamObserver
from gateway.upstream.transport import TransportTimeouts

from .fit import StreamTimes

CHAT = b"/v1/chat/completions"
ANSWER_BYTES_MAX = 1 << 20
MESSAGE_CHARACTERS_MAX = 300
CHARACTERS_PER_TOKEN = 4.0
"""Of the first prompt; what the engine counted tells it for the next ones."""

_SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "po", "ri", "sa", "te", "vo")


class EngineProblem(Exception):
    """Why this engine cannot be measured."""


class PromptTooLong(EngineProblem):
    """The engine refused a prompt as it stands (400, 413 or 422)."""


class EngineFull(EngineProblem):
    """The engine takes no more requests at once (429 or 503)."""


class Prompts:
    """Texts of about so many tokens, no two alike from the first word on: a prefix cache finds nothing."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = Random(seed)
        self._characters_per_token = CHARACTERS_PER_TOKEN

    def text(self, tokens: int) -> str:
        characters = max(round(tokens * self._characters_per_token), 1)
        words: list[str] = []
        length = 0
        while length < characters:
            words.append("".join(self._random.choices(_SYLLABLES, k=self._random.randint(1, 4))))
            length += len(words[-1]) + 1
        return " ".join(words)[:characters]

    def counted(self, text: str, tokens: int) -> None:
        """The engine says that this text, with what it put around it, had so many tokens."""
        self._characters_per_token = min(max(len(text) / max(tokens, 1), 0.5), 16.0)


class Engine:
    """`await open()`, then `ask`, then `await aclose()`."""

    def __init__(self, url: str, model: str | None, api_key: str | None, *, seed: int | None = None) -> None:
        """ValueError for a URL that is none. It may end in `/v1`, as clients write it."""
        self.url = url.rstrip("/").removesuffix("/v1")
        credential = None if api_key is None else f"Bearer {api_key}".encode()
        address = UpstreamAddress("engine", self.url, credential=credential)
        self._upstream = Upstream(address, TransportTimeouts(idle_seconds=300.0))
        self._headers = [(b"content-type", b"application/json"), (b"accept", b"text/event-stream")]
        if credential is not None:
            self._headers.append((b"authorization", credential))
        self._prompts = Prompts(seed)
        self._knows_fixed_length = True
        self.model = model or ""
        self.context_tokens: int | None = None
        """The longest prompt with its answer, where the engine tells."""
        self.tokens_used = 0

    async def open(self) -> None:
        """Find the model, and see that answers are streamed and their tokens counted. Raises
        `EngineProblem`."""
        await self._find_model()
        await self.ask(64, 4)
        text, times = await self._asked(256, 4)
        self._prompts.counted(text, times.input_tokens)

    async def aclose(self) -> None:
        await self._upstream.aclose()

    async def ask(self, input_tokens: int, output_tokens: int) -> StreamTimes:
        """A prompt of about so many tokens, nobody's before, answered by exactly so many where the engine
        can be told so. Raises `EngineProblem`."""
        return (await self._asked(input_tokens, output_tokens))[1]

    async def _asked(self, input_tokens: int, output_tokens: int) -> tuple[str, StreamTimes]:
        text = self._prompts.text(input_tokens)
        try:
            return text, await self._answered(text, output_tokens)
        except PromptTooLong:
            if not self._knows_fixed_length:
                raise
        # Perhaps it was not the prompt: `ignore_eos` and `min_tokens` are vLLM's and SGLang's own.
        self._knows_fixed_length = False
        try:
            return text, await self._answered(text, output_tokens)
        except PromptTooLong:
            self._knows_fixed_length = True
            raise

    async def _answered(self, text: str, output_tokens: int) -> StreamTimes:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._knows_fixed_length:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        encoded = json.dumps(body).encode()
        sent = time.monotonic_ns()
        try:
            response = await self._upstream.send(b"POST", CHAT, self._headers, encoded)
            if response.status != 200:
                raise await self._refused(response)
            return await self._followed(response, sent)
        except UpstreamError as error:
            raise EngineProblem(f"{self.url}: {error}") from error

    async def _followed(self, response: Response, sent: int) -> StreamTimes:
        observer = StreamObserver("chat", strip_usage=False)
        events: list[float] = []
        while piece := await response.read():
            now = time.monotonic_ns()
            seen = observer.token_events
            observer.feed(piece, now)
            events += [now / 1e9] * (observer.token_events - seen)
        ended = time.monotonic_ns()
        observer.end(ended)
        if observer.error is not None:
            raise EngineProblem(f"{self.url}: an answer broke off: {_shortened(observer.error)}")
        if not observer.done and not observer.finished:
            raise EngineProblem(f"{self.url}: answers are not streamed as server-sent events")
        if observer.usage is None:
            raise EngineProblem(
                f"{self.url}: no token counts: the stream has no `usage`, although "
                "stream_options.include_usage asked for it"
            )
        usage = observer.usage
        self.tokens_used += usage.input_tokens + usage.output_tokens
        return StreamTimes(
            sent / 1e9,
            ended / 1e9,
            tuple(events),
            usage.input_tokens,
            usage.output_tokens,
            usage.cached_tokens,
        )

    async def _find_model(self) -> None:
        served = await self._served_models()
        names = ", ".join(served)
        if self.model and served and self.model not in served:
            raise EngineProblem(f"{self.url} does not serve the model {self.model!r}; it serves {names}")
        if not self.model and len(served) == 1:
            (self.model,) = served
        if not self.model:
            which = f"it serves {names}" if served else "it does not list its models"
            raise EngineProblem(f"{self.url}: which model? {which}; name one with --model")
        self.context_tokens = served.get(self.model)

    async def _served_models(self) -> dict[str, int | None]:
        """With their context length, where the engine tells; empty where it does not list them."""
        try:
            response = await self._upstream.get("/v1/models", b"application/json")
            if response.status in (404, 405, 501):
                await response.read_all(ANSWER_BYTES_MAX)
                return {}
            if response.status != 200:
                raise await self._refused(response)
            body = await response.read_all(ANSWER_BYTES_MAX)
        except UpstreamError as error:
            raise EngineProblem(f"{self.url}: {error}") from error
        try:
            return {entry["id"]: _count(entry.get("max_model_len")) for entry in json.loads(body)["data"]}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineProblem(
                f"{self.url}/v1/models is no list of models: is this an OpenAI-compatible engine?"
            ) from error

    async def _refused(self, response: Response) -> EngineProblem:
        said = _shortened(await response.read_all(ANSWER_BYTES_MAX))
        told = f"{self.url} answers {response.status}: {said}"
        if response.status in (401, 403):
            return EngineProblem(f"{told}\n--api-key-env names the environment variable with its key")
        if response.status == 404:
            return EngineProblem(f"{told}\nis the URL right, and the model {self.model!r} one it serves?")
        return _BY_STATUS.get(response.status, EngineProblem)(told)


_BY_STATUS: dict[int, type[EngineProblem]] = {
    400: PromptTooLong,
    413: PromptTooLong,
    422: PromptTooLong,
    429: EngineFull,
    503: EngineFull,
}


def _count(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _shortened(body: bytes) -> str:
    """The engine's own words, if they are where engines have them."""
    text = body.decode(errors="replace")
    try:
        told = json.loads(text)
        error = told.get("error", told) if isinstance(told, Mapping) else told
        message = error.get("message", text) if isinstance(error, Mapping) else error
    except ValueError:
        message = text
    words = " ".join(str(message).split())
    return words if len(words) <= MESSAGE_CHARACTERS_MAX else words[:MESSAGE_CHARACTERS_MAX] + " …"
