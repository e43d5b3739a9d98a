"""How log lines look: JSON, or coloured text on a terminal; the standard library's loggers alike.

JSON lines begin with `ts`, `level`, `event`. Tracebacks show code and no values of variables, and free
text is searched for what looks like a key, because other people's exceptions quote headers and URLs.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import Processor

from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.telemetry.log_output import LogOutput

Format = Literal["auto", "console", "json"]

_FREE_TEXT = ("event", "exception", "error", "reason", "detail", "url")
_SECRET_NAMES = frozenset({"authorization", "x-api-key", "api_key", "api-key", "cookie", "operations_token"})
_SECRET = re.compile(
    r"(?i)(\bbearer\s+|\bbasic\s+(?=\S{8})|\b(?:x-)?api[-_]?key\b['\"]?[\s:=,]+(?:b?['\"])?|[?&](?:key|token)=)"
    r"[^\s'\",;&]+|\bsk-[\w-]{8,}"
)
_TALKATIVE = ("httpx", "httpcore", "asyncio", "urllib3")

HIDDEN = "***"
_LEVEL_NUMBERS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items() if number}
_LEVELS = {"warn": "warning", "exception": "error", "fatal": "critical"}

_EventDict = MutableMapping[str, Any]
_encode = msgspec.json.Encoder(enc_hook=str).encode
_output: LogOutput | None = None
_json_from: int | None = None  # the lowest level that is written, where lines are JSON


class _LineLogger:
    """What a bound logger writes to: a finished line, whatever its level."""

    def __init__(self, output: LogOutput) -> None:
        self._write = output.write

    def msg(self, line: str) -> None:
        self._write(line)

    debug = info = warning = error = critical = exception = msg


class _Handler(logging.Handler):
    """The standard library's records, to the same output."""

    def __init__(self, output: LogOutput, processors: list[Processor]) -> None:
        super().__init__()
        self._output = output
        self._processors = processors

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line: Any = {"event": record.getMessage(), "logger": record.name}
            if record.exc_info:
                line["exc_info"] = record.exc_info
            for process in self._processors:
                line = process(None, record.levelname.lower(), line)
            self._output.write(line)
        except Exception:
            self.handleError(record)


def configure_logging(
    level: str = "info", format: Format = "auto", stream: TextIO | None = None
) -> LogOutput:
    """Send all log lines to `stream` (standard output if None), in place of what an earlier call chose.

    Start uvicorn with `log_config=None`, or it installs its own. Its access log is off: the request log
    says more. A logger that was bound before keeps its level and look.
    """
    global _json_from, _output
    stream = stream if stream is not None else sys.stdout
    if _output is None or _output.stream is not stream:
        if _output is not None:
            _output.close()
        _output = LogOutput(stream)
    output = _output
    on_console = format == "console" or (format == "auto" and stream.isatty())
    _json_from = None if on_console else _LEVEL_NUMBERS[level]
    processors: list[Processor] = [
        structlog.processors.format_exc_info,
        redact,
        Stamp(),
        *(_console(stream) if on_console else [render_json]),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _LineLogger(output),
        cache_logger_on_first_use=False,
    )
    _configure_standard_library(_Handler(output, processors), level)
    return output


def json_lines(event: str) -> Callable[[str, dict[str, Any]], None] | None:
    """How to write JSON lines of this event (level, fields) past loggers and processors: for lines that come
    by the thousand, and quote nobody. None where lines are not JSON."""
    if _output is None or _json_from is None:
        return None
    write, stamp = _output.write, Stamp()
    levels = [name for name, number in _LEVEL_NUMBERS.items() if number >= _json_from]

    def write_line(level: str, fields: dict[str, Any]) -> None:
        if level in levels:
            write(render_json(None, level, {**stamp.head(level, event), **fields}))

    return write_line


def _configure_standard_library(handler: _Handler, level: str) -> None:
    root = logging.getLogger()
    for other in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False
    access.disabled = True
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


# ---------------------------------------------------------------------- what happens to a line


def redact(_: Any, __: str, line: _EventDict) -> _EventDict:
    """Put `***` in the place of keys."""
    if not _SECRET_NAMES.isdisjoint(line):
        for name in _SECRET_NAMES.intersection(line):
            line[name] = HIDDEN
    for name in _FREE_TEXT:
        text = line.get(name)
        if text is None or (isinstance(text, str) and text.isalpha()):  # a single word: most events are
            continue
        if isinstance(text, (str, BaseException)):
            line[name] = _SECRET.sub(_without_secret, str(text))
    return line


def _without_secret(found: re.Match[str]) -> str:
    return (found[1] or "") + HIDDEN


class Stamp:
    """Puts `ts`, `level` and `event` first; universal time in milliseconds. What is true for a whole second
    is written out once."""

    def __init__(self, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._now = wall_clock_ns
        self._second = -1
        self._prefix = ""

    def __call__(self, _: Any, level: str, line: _EventDict) -> _EventDict:
        return {**self.head(level, line.pop("event", "")), **line}

    def head(self, level: str, event: Any) -> dict[str, Any]:
        second, rest = divmod(self._now(), NANOSECONDS_PER_SECOND)
        if second != self._second:
            self._second = second
            self._prefix = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        ts = f"{self._prefix}{rest // 1_000_000:03d}Z"
        return {"ts": ts, "level": _LEVELS.get(level, level), "event": event}


def render_json(_: Any, __: str, line: _EventDict) -> str:
    try:
        return _encode(line).decode()
    except (UnicodeEncodeError, TypeError, ValueError):  # such as half a surrogate pair
        return json.dumps({str(k): str(v) for k, v in line.items()})


def _console(stream: TextIO) -> list[Processor]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=stream.isatty(),
        sort_keys=False,
        timestamp_key="ts",
        exception_formatter=structlog.dev.plain_traceback,
    )
    return [_without_none, renderer]


def _without_none(_: Any, __: str, line: _EventDict) -> _EventDict:
    return {name: value for name, value in line.items() if value is not None}
