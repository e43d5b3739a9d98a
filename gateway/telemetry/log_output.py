"""Where log lines go: gathered, and written by a thread of their own.

A write for each line costs the event loop a system call, and a reader that has stopped reading would
stop the gateway. So lines are gathered in memory and written together, `FLUSH_SECONDS` after the first
of them at the latest, and at exit. What a reader leaves unread is kept up to `HELD_CHARACTERS_MAX`;
beyond that lines are dropped, and the log says how many. A process that is killed outright loses the
lines of its last tenth of a second.
"""

import atexit
import threading
from typing import TextIO

FLUSH_SECONDS = 0.1
HELD_CHARACTERS_MAX = 8 * 1024 * 1024


class LogOutput:
    def __init__(self, stream: TextIO, held_characters_max: int = HELD_CHARACTERS_MAX) -> None:
        self.stream = stream
        self._held_max = held_characters_max
        self._lines: list[str] = []
        self._held = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Take one line, without its line feed."""
        with self._lock:
            if self._held > self._held_max:
                self._dropped += 1
                return
            self._lines.append(line)
            self._held += len(line) + 1
            if not self._closed.is_set():
                if not self._waiting.is_set():
                    self._wake()
                return
        self.flush()

    def _wake(self) -> None:
        self._waiting.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log output", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def flush(self) -> None:
        """Write what is held, in the calling thread."""
        with self._writing:
            with self._lock:
                lines, dropped = self._lines, self._dropped
                self._lines, self._held, self._dropped = [], 0, 0
                self._waiting.clear()
            if dropped:
                lines.append(f'{{"level":"warning","event":"log lines dropped","count":{dropped}}}')
            if lines:
                lines.append("")
                self._put("\n".join(lines))

    def close(self) -> None:
        """Write what is held and end the thread. Lines that still come are written one by one."""
        self._closed.set()
        self._waiting.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=2)
            atexit.unregister(self.close)
            if thread.is_alive():
                return  # the reader has stopped reading: writing here would wait for it for ever
        self.flush()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._waiting.wait()
            self._closed.wait(FLUSH_SECONDS)
            self.flush()

    def _put(self, text: str) -> None:
        try:
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                self.stream.write(text.encode("ascii", "backslashreplace").decode())
            self.stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads, or the stream was closed: there is no other place to say so
