"""The paths that reach an engine, and what each of them needs. Everything else is 404: engines expose
dangerous ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from gateway.api.body import BodyDialect
from gateway.api.error_forms import ANTHROPIC, OPENAI, RESPONSES, ErrorForm
from gateway.upstream.stream_observer import Dialect as StreamDialect


class Use(Enum):
    """What a path is for, and so what a request to it costs."""

    GENERATE = "generate"
    """Tokens in and out: it needs a bucket and a lease."""
    READ = "read"
    """Tokens in, no tokens out, no stream: bucket and lease, and only the input is paid."""
    HELP = "help"
    """Next to no work for an engine: a key is enough."""
    LIST_MODELS = "list models"
    """As `HELP`, and every engine is asked."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    methods: tuple[str, ...]
    use: Use
    dialect: BodyDialect | None = None
    """How the body of what has to be paid is read."""
    summary: str = ""
    errors: ErrorForm = OPENAI
    """How the gateway's own errors look."""
    takes_form: bool = False
    """The body is a form with a piece of sound, and goes to the engine as it comes."""
    answers_bytes: bool = False
    """A plain answer goes to the client as it comes, for it may be long in the making."""

    def is_budgeted(self, method: str) -> bool:
        """Whether such a request needs a bucket and a lease. A mere look (GET, HEAD) never does."""
        return method == "POST" and self.use in (Use.GENERATE, Use.READ)

    @property
    def tells_usage_if_asked(self) -> bool:
        """Its streams say what was used only where `stream_options` ask for it; typed ones always do."""
        return self.dialect in ("chat", "completions")

    @property
    def has_known_answers(self) -> bool:
        """A plain answer is a JSON object, and a stream has an end mark."""
        return self.dialect in _STREAM_DIALECTS

    @property
    def stream_dialect(self) -> StreamDialect:
        """How its streams are read. Of one that is not known, what looks like chat is counted."""
        return "transcription" if self.takes_form else _STREAM_DIALECTS.get(self.dialect, "chat")


_STREAM_DIALECTS: Mapping[BodyDialect | None, StreamDialect] = {
    "chat": "chat",
    "completions": "completions",
    "responses": "responses",
    "messages": "messages",
}

_POST = ("POST",)
_LOOK = ("GET", "HEAD")

_ALL = (
    Endpoint("/v1/chat/completions", _POST, Use.GENERATE, "chat", "Chat completion, streaming or plain"),
    Endpoint("/v1/completions", _POST, Use.GENERATE, "completions", "Text completion, streaming or plain"),
    Endpoint(
        "/v1/responses", _POST, Use.GENERATE, "responses", "Response, streaming or plain", errors=RESPONSES
    ),
    Endpoint(
        "/v1/messages",
        _POST,
        Use.GENERATE,
        "messages",
        "Message in Anthropic's form, streaming or plain",
        errors=ANTHROPIC,
    ),
    Endpoint(
        "/v1/audio/transcriptions",
        _POST,
        Use.GENERATE,
        None,
        "The text of a piece of speech, streaming or plain",
        takes_form=True,
    ),
    Endpoint(
        "/v1/audio/translations",
        _POST,
        Use.GENERATE,
        None,
        "The English text of a piece of speech, streaming or plain",
        takes_form=True,
    ),
    Endpoint("/v1/audio/speech", _POST, Use.GENERATE, "other", "A text, spoken", answers_bytes=True),
    Endpoint("/v1/embeddings", _POST, Use.READ, "embeddings", "Embeddings of one or more inputs"),
    Endpoint("/pooling", _POST, Use.READ, "embeddings", "A pooling model's own output"),
    Endpoint("/classify", _POST, Use.READ, "embeddings", "Classes of one or more inputs"),
    Endpoint("/v1/score", _POST, Use.READ, "score", "How well pairs of texts match"),
    Endpoint("/score", _POST, Use.READ, "score", "How well pairs of texts match"),
    Endpoint("/v1/rerank", _POST, Use.READ, "rerank", "Documents in the order of their relevance"),
    Endpoint("/rerank", _POST, Use.READ, "rerank", "Documents in the order of their relevance"),
    Endpoint("/tokenize", _POST, Use.HELP, None, "The tokens of a text or a conversation"),
    Endpoint("/detokenize", _POST, Use.HELP, None, "The text of some tokens"),
    Endpoint(
        "/v1/messages/count_tokens",
        _POST,
        Use.HELP,
        None,
        "How many tokens a conversation has",
        errors=ANTHROPIC,
    ),
    Endpoint("/v1/models", _LOOK, Use.LIST_MODELS, None, "The models that the engines serve"),
)

ENDPOINTS: Mapping[str, Endpoint] = {endpoint.path: endpoint for endpoint in _ALL}

_NOWHERE = Endpoint("", (), Use.HELP)
_NOWHERE_NEAR_MESSAGES = Endpoint("", (), Use.HELP, errors=ANTHROPIC)


def nowhere(path: str) -> Endpoint:
    """Stands for a path that is not there. Whoever looks for more below messages reads Anthropic's errors."""
    return _NOWHERE_NEAR_MESSAGES if path.startswith("/v1/messages/") else _NOWHERE


def with_extra_paths(paths: Iterable[str]) -> Mapping[str, Endpoint]:
    """`ENDPOINTS`, and paths that the operator allows besides. What they mean is not known here: a POST is
    taken for a generation with all it can cost, GET and HEAD for a look."""
    extra = {
        path: Endpoint(path, (*_LOOK, *_POST), Use.GENERATE, "other", "Allowed by this gateway's operator")
        for path in paths
    }
    return {**extra, **ENDPOINTS}
