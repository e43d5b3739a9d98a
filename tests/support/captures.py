"""What real engines have answered, byte for byte (tests/captures), and what a person reads in it.

The framing is taken off here by the plainest means, so that what the gateway reads can be held against it.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gateway.policy.request import Usage
from gateway.upstream.stream_observer import Dialect

FOLDER = Path(__file__).parents[1] / "captures"
END_OF_HEAD = b"\r\n\r\n"


@dataclass(frozen=True)
class Capture:
    """One response and the request that it answered, by the name of both: `vllm/chat-nonstream`."""

    name: str

    def __str__(self) -> str:
        return self.name

    @cached_property
    def raw(self) -> bytes:
        """The whole response: head, and body in its framing."""
        return (FOLDER / f"{self.name}.response.raw").read_bytes()

    @cached_property
    def request(self) -> bytes:
        return (FOLDER / f"{self.name}.request.raw").read_bytes()

    @cached_property
    def target(self) -> str:
        """The path that was asked."""
        return self.request.split(b" ", 2)[1].decode()

    @cached_property
    def request_body(self) -> bytes:
        return self.request.partition(END_OF_HEAD)[2]

    @cached_property
    def _lines(self) -> list[bytes]:
        return self.raw.partition(END_OF_HEAD)[0].split(b"\r\n")

    @cached_property
    def status(self) -> int:
        return int(self._lines[0].split(b" ")[1])

    @cached_property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """As they came."""
        return [
            (name, value.strip()) for name, _, value in (line.partition(b":") for line in self._lines[1:])
        ]

    def header(self, name: bytes) -> bytes | None:
        return {received.lower(): value for received, value in self.headers}.get(name)

    @property
    def is_chunked(self) -> bool:
        return self.header(b"transfer-encoding") is not None

    @cached_property
    def chunks(self) -> list[bytes]:
        """The pieces that the engine wrote; a body with a length is one."""
        rest = self.raw.partition(END_OF_HEAD)[2]
        if not self.is_chunked:
            assert len(rest) == int(self.header(b"content-length") or b"-1")
            return [rest]
        pieces = []
        while True:
            line, rest = rest.split(b"\r\n", 1)
            size = int(line, 16)
            piece, end, rest = rest[:size], rest[size : size + 2], rest[size + 2 :]
            assert end == b"\r\n"
            if not piece:
                assert rest == b""
                return pieces
            pieces.append(piece)

    @cached_property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each byte of the body is in `raw`."""
        offsets: list[int] = []
        at = self.raw.index(END_OF_HEAD) + len(END_OF_HEAD)
        for piece in self.chunks:
            if self.is_chunked:
                at = self.raw.index(b"\r\n", at) + 2
            offsets += range(at, at + len(piece))
            at += len(piece) + 2
        return offsets

    @cached_property
    def events(self) -> list[bytes]:
        """Of a stream; these engines end lines with LF alone."""
        *events, rest = self.body.split(b"\n\n")
        assert rest == b""
        return [event + b"\n\n" for event in events]


@dataclass(frozen=True)
class Stream:
    """A captured stream as it is to be understood, read off the capture by eye.

    before          events ahead of the first token
    token_events    events with text, all in a row
    usage_event     index of the event that says nothing but the usage; None where there is none
    next_number     what comes after the last `sequence_number`
    """

    capture: Capture
    dialect: Dialect
    before: int
    token_events: int
    usage: Usage | None
    usage_event: int | None = None
    next_number: int = 0

    def __str__(self) -> str:
        return self.capture.name

    @property
    def without_usage(self) -> bytes:
        """The body for a client that did not ask what was used."""
        return b"".join(e for index, e in enumerate(self.capture.events) if index != self.usage_event)

    @property
    def output_tokens(self) -> int:
        return self.usage.output_tokens if self.usage else self.token_events


def captures() -> list[Capture]:
    """All, in the order of their names."""
    files = sorted(FOLDER.glob("*/*.response.raw"))
    return [Capture(f"{file.parent.name}/{file.name.removesuffix('.response.raw')}") for file in files]


STREAMS = [
    Stream(Capture("vllm/chat-stream-usage"), "chat", 1, 12, Usage(42, 12), 13),
    Stream(Capture("vllm/chat-stream-no-usage"), "chat", 1, 6, None),
    Stream(Capture("vllm/chat-stream-continuous-usage"), "chat", 1, 6, Usage(42, 6), 7),
    Stream(Capture("vllm/chat-n2-logprobs-stream"), "chat", 2, 6, Usage(42, 6), 8),
    Stream(Capture("vllm/completion-stream-usage"), "completions", 0, 12, Usage(2, 12), 12),
    Stream(Capture("vllm/responses-stream"), "responses", 4, 5, Usage(17, 8), next_number=13),
    Stream(Capture("vllm/anthropic-messages-stream"), "messages", 2, 8, Usage(14, 8)),
    Stream(Capture("llamacpp/chat-stream-usage"), "chat", 1, 12, Usage(42, 12, 41), 14),
    Stream(Capture("llamacpp/chat-stream-no-usage"), "chat", 1, 6, None),
    Stream(Capture("llamacpp/completion-stream-usage"), "completions", 0, 12, Usage(2, 12, 1)),
    Stream(Capture("llamacpp/responses-stream"), "responses", 4, 8, Usage(17, 8, 16)),
]

ANSWERS = {
    "vllm/anthropic-messages": Usage(14, 8),
    "vllm/chat-nonstream": Usage(42, 12),
    "vllm/chat-priority": Usage(42, 4),
    "vllm/completion-batch-prompts": Usage(4, 8),
    "vllm/completion-nonstream": Usage(2, 12),
    "vllm/completion-stop": Usage(2, 2),
    "vllm/completion-token-ids": Usage(3, 4),
    "vllm/err-unknown-field-ok": Usage(42, 2),
    "vllm/responses-nonstream": Usage(17, 8),
    "llamacpp/anthropic-messages": Usage(14, 8, 4),
    "llamacpp/chat-nonstream": Usage(42, 12),
    "llamacpp/chat-priority": Usage(42, 4, 41),
    "llamacpp/completion-batch-prompts": Usage(2, 4, 1),
    "llamacpp/completion-nonstream": Usage(2, 12),
    "llamacpp/err-bad-model": Usage(42, 4, 41),
    "llamacpp/responses-nonstream": Usage(17, 8),
}
"""Plain answers to requests for tokens, and what they say was used."""

HELP = ("detokenize", "health", "models", "tokenize-chat", "tokenize-prompt")
"""Answers that cost no tokens, where an engine has them."""

FULL = ("vllm/err-queue-full-503", "vllm/err-queue-full-503-stream")

ERRORS = {
    "vllm/err-404": 404,
    "vllm/err-405": 405,
    "vllm/err-bad-model": 404,
    "vllm/err-bad-model-stream": 404,
    "vllm/err-bad-temperature": 400,
    "vllm/err-empty-body": 400,
    "vllm/err-malformed-json": 400,
    "vllm/err-max-tokens-too-big": 400,
    "vllm/err-missing-messages": 400,
    "vllm/err-prompt-too-long": 400,
    "vllm/err-wrong-type": 400,
    "llamacpp/err-404": 404,
    "llamacpp/err-405": 404,
    "llamacpp/err-empty-body": 400,
    "llamacpp/err-malformed-json": 400,
    "llamacpp/err-missing-messages": 400,
    "llamacpp/err-prompt-too-long": 400,
}
"""What the engines refuse, and the status."""
