"""Which connections are open, and which of them may carry the next request.

Last in, first out: under falling load the surplus grows old and is retired, and the warm ones are used. How
many are in use is not limited here; that is the gate's decision. Ages are seconds since the last response
ended.

An upstream closes idle connections after a time of its own, and a request that crosses the close is lost.
So they are retired before that: after `retire_seconds`, or half the smallest age at which the upstream was
seen to close one. A restart of the upstream looks the same, so what was learned is forgotten after ten
minutes.
"""

import asyncio

from gateway.upstream.http1 import Http1Connection

LEARNED_FRACTION = 0.5
LEARNED_SECONDS_MIN = 0.05
LEARNED_KEPT_SECONDS = 600.0
TRUSTED_SECONDS = 0.25
"""Up to this age a connection is used unasked; above it the system call that looks for a pending end pays."""


class ConnectionPool:
    def __init__(self, *, retire_seconds: float, max_idle: int) -> None:
        self._configured_retire_seconds = retire_seconds
        self._max_idle = max_idle
        self._idle: dict[Http1Connection, None] = {}  # an ordered set, oldest first
        self._busy: set[Http1Connection] = set()
        self._open: set[Http1Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._all_lost: asyncio.Future[None] | None = None
        self._forget_at = 0.0
        self.retire_seconds = retire_seconds
        self.closed = False

    @property
    def in_use(self) -> int:
        """Connections that carry an exchange or are being opened for one."""
        return len(self._busy)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def new(self, loop: asyncio.AbstractEventLoop) -> Http1Connection:
        """A connection still to be opened, counted as in use."""
        self._loop = loop
        connection = Http1Connection(self, loop)
        self._busy.add(connection)
        return connection

    def take(self, now: float) -> Http1Connection | None:
        """The idle connection used last, if one is fit for use."""
        while self._idle:
            connection = next(reversed(self._idle))
            if self._fit(connection, now - connection.idle_since):
                del self._idle[connection]
                self._busy.add(connection)
                return connection
            connection.close()
        return None

    async def aclose(self) -> None:
        """Close every connection and wait until the sockets are gone."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._idle, *self._busy]:
            connection.give_up("the transport was closed")
        if self._open and self._loop is not None:
            self._all_lost = self._loop.create_future()
            await self._all_lost

    # What connections report.

    def opened(self, connection: Http1Connection) -> None:
        self._open.add(connection)

    def put_back(self, connection: Http1Connection) -> None:
        self._busy.discard(connection)
        if self.closed or self._max_idle <= 0:
            connection.close()
            return
        if len(self._idle) >= self._max_idle:
            next(iter(self._idle)).close()
        assert self._loop is not None
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self.retire_seconds, self._sweep)

    def closed_by_peer(self, connection: Http1Connection) -> None:
        """The upstream has ended an idle connection, or one that was idle until a moment ago."""
        if connection.idle_since and self._loop is not None:
            self._learn(self._loop.time() - connection.idle_since)

    def dropped(self, connection: Http1Connection) -> None:
        self._busy.discard(connection)
        self._idle.pop(connection, None)

    def lost(self, connection: Http1Connection) -> None:
        self._open.discard(connection)
        if not self._open and self._all_lost is not None and not self._all_lost.done():
            self._all_lost.set_result(None)

    # Growing old.

    def _fit(self, connection: Http1Connection, age: float) -> bool:
        if age >= self.retire_seconds:
            return False
        if age > TRUSTED_SECONDS and connection.has_input():
            self._learn(age)
            return False
        return True

    def _learn(self, age: float) -> None:
        learned = max(LEARNED_SECONDS_MIN, LEARNED_FRACTION * age)
        if learned < self.retire_seconds and self._loop is not None:
            self.retire_seconds = learned
            self._forget_at = self._loop.time() + LEARNED_KEPT_SECONDS

    def _sweep(self) -> None:
        self._sweeper = None
        assert self._loop is not None
        now = self._loop.time()
        if now >= self._forget_at:
            self.retire_seconds = self._configured_retire_seconds
        while self._idle:
            oldest = next(iter(self._idle))
            left = oldest.idle_since + self.retire_seconds - now
            if left > 0.0:
                self._sweeper = self._loop.call_later(left, self._sweep)
                return
            oldest.close()
