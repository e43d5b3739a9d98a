"""A text stream into a file that is turned over when it is full, by whole lines: the standard library's
rotation (`log`, before it `log.1`, `log.2` …), with a heading at the top of each file.

The files are their owner's alone. A disk that is full, or a folder that has gone, costs lines but stops
nobody: the log says so once, each write tries anew, and the file then says how many lines it lacks.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

import structlog

_log = structlog.get_logger("gateway")

OWNER_ONLY = 0o600


class RotatingFile(RotatingFileHandler):
    """`files` counts the one that is written. A file holds at least one line, however long that is.

    Not to be written to by two threads at once, which `LogOutput` sees to.
    """

    def __init__(self, path: Path, max_bytes: int, files: int, heading: Callable[[], str]) -> None:
        """Opens the file and writes a heading; what stands there already is kept. Raises OSError."""
        super().__init__(path, maxBytes=max_bytes, backupCount=files - 1, encoding="utf-8", delay=True)
        self._heading = heading
        self._bytes = 0
        self._lines = 0  # below the last heading
        self._lost = 0
        try:
            if os.path.isfile(path) and os.path.getsize(path) >= max_bytes:
                self._turn_over()
            self._begin().flush()
        except OSError:
            self._drop_stream()
            raise

    def write(self, text: str) -> int:
        """Whole lines, each with its line feed; when this returns they are in the file or counted as lost."""
        lines = text.removesuffix("\n").split("\n")
        try:
            self._write_lines(lines)
        except OSError as error:
            self._give_up(error, len(lines))
        return len(text)

    def _write_lines(self, lines: Sequence[str]) -> None:
        stream = self.stream or self._begin()
        for line in lines:
            size = len(line.encode()) + 1
            if self._lines and self._bytes + size > self.maxBytes:
                self._turn_over()
                stream = self._begin()
            stream.write(line + "\n")
            self._bytes += size
            self._lines += 1
        stream.flush()
        if self._lost:
            _log.info("the file is written again", file=self.baseFilename, lines_lost_at_most=self._lost)
            self._lost = 0

    def _turn_over(self) -> None:
        if not os.path.isfile(self.baseFilename):
            return  # a device or a pipe has no end
        self.doRollover()
        if not self.backupCount:
            os.truncate(self.baseFilename, 0)

    def _begin(self) -> TextIOWrapper:
        """Open the file, which by now has room, and put the heading."""
        stream = self.stream = self.stream or self._open()
        self._bytes = os.fstat(stream.fileno()).st_size
        text = self._heading() + "\n"
        if self._bytes and not _ends_a_line(self.baseFilename):  # a process that was killed, a full disk
            text = "\n" + text
        if self._lost:
            text += f'{{"level":"warning","event":"log lines dropped","count":{self._lost}}}\n'
        stream.write(text)
        self._bytes += len(text.encode())
        self._lines = 0
        return stream

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", newline="\n", opener=_open_for_owner)

    def _give_up(self, error: OSError, lines: int) -> None:
        if not self._lost:
            why = error.strerror or str(error)
            _log.warning("the file cannot be written", file=self.baseFilename, reason=why)
        self._lost += lines
        self._drop_stream()

    def _drop_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(OSError):  # it tries once more to write what it holds
                stream.close()


def _open_for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, OWNER_ONLY)


def _ends_a_line(path: str) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
