"""The store of the shared budget: Redis or Valkey through redis-py, one script call for each renewal.

Every failure of it is told as `StoreFailed` with a reason out of a short list; nothing is tried twice. A
script that the server does not know is loaded and called again by redis-py. All keys carry the prefix as
their hash tag, so a cluster keeps them in one slot, and all are named to the script; where the slot is at
another node of the cluster, the calls go there until one fails.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Literal, cast

import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.fleet.messages import Granted, Renewal, packed, read_granted

FORMAT = 1
"""Of messages and records: replicas that speak another one share nothing."""
KEYS = ("members", "plan", "held", "budgets", "buckets", "lead", "epoch")
CLOSING_PART = 0.1
"""Of the time that a call may take: to close its connection when it has failed."""

Reason = Literal["unreachable", "timed_out", "denied", "read_only", "loading", "error"]


class StoreFailed(Exception):
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class SharedBudget:
    """`member` is this replica's name, another one after each start. The address may hold a password: it is
    in no message."""

    def __init__(
        self, url: str, member: str, prefix: str = "qos-gateway", call_seconds_max: float = 0.5
    ) -> None:
        self.member = member
        self._seconds = call_seconds_max
        self._keys = [f"{{{prefix}}}:{FORMAT}:{key}" for key in KEYS]
        self._redis = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=call_seconds_max,
            socket_connect_timeout=call_seconds_max,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name="qos-gateway",
            max_connections=2,
        )
        self._address = {name: self._kwargs.get(name) for name in ("host", "port")}
        self._renew = self._redis.register_script(_script("renew.lua"))
        self._leave = self._redis.register_script(_script("leave.lua"))

    async def renew(self, renewal: Renewal) -> tuple[Granted, Sequence[str]]:
        """Raises StoreFailed; it is then unknown whether the store has heard."""
        answer = await self._call(self._renew, [self.member, packed(renewal)])
        return read_granted(answer[0]), [signals.decode() for signals in answer[1:]]

    async def leave(self) -> None:
        """Raises StoreFailed; what is held then comes back when the lease ends."""
        await self._call(self._leave, [self.member])

    async def close(self) -> None:
        await self._redis.aclose()

    @property
    def _kwargs(self) -> dict[str, Any]:
        """What new connections are made with."""
        return self._redis.connection_pool.connection_kwargs

    async def _call(self, script: Any, arguments: list[Any]) -> list[bytes]:
        try:
            async with asyncio.timeout((1 - CLOSING_PART) * self._seconds):
                try:
                    return cast(list[bytes], await script(keys=self._keys, args=arguments))
                except exceptions.MovedError as moved:
                    if "path" in self._kwargs:
                        raise  # a socket of this machine has no other address
                    await self._go_to(moved.host or self._kwargs.get("host"), moved.port)
                    return cast(list[bytes], await script(keys=self._keys, args=arguments))
        except Exception as error:
            # the next call is on a new connection: behind the same address there may be another server by now
            await self._go_to(**self._address)
            if isinstance(error, (exceptions.RedisError, OSError, TimeoutError)):
                raise StoreFailed(_reason(error), self._message(error)) from error
            raise

    async def _go_to(self, host: str | None, port: int | None) -> None:
        """None: redis-py's default."""
        for name, value in (("host", host), ("port", port)):
            self._kwargs.pop(name, None)
            if value is not None:
                self._kwargs[name] = value
        pool = self._redis.connection_pool
        try:
            with suppress(Exception):  # a connection that does not close in time is given up
                async with asyncio.timeout(CLOSING_PART * self._seconds):
                    await pool.disconnect()
        finally:
            pool.reset()  # type: ignore[no-untyped-call]  # kept connections know their address

    def _message(self, error: Exception) -> str:
        """redis-py names host, port and path, never the password; a server might repeat what it was sent."""
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        password = self._kwargs.get("password")
        return told.replace(password, "***") if password else told


def _script(name: str) -> str:
    return (files("gateway.fleet") / name).read_text(encoding="utf-8")


def _reason(error: Exception) -> Reason:
    told = str(error)
    match error:
        case TimeoutError() | exceptions.TimeoutError():
            return "timed_out"
        case exceptions.AuthenticationError() | exceptions.NoPermissionError():
            return "denied"
        case exceptions.ReadOnlyError():
            return "read_only"
        case exceptions.BusyLoadingError():
            return "loading"
        case exceptions.ConnectionError() | OSError():
            return "unreachable"
    if told.startswith(("NOAUTH", "WRONGPASS", "NOPERM")):
        return "denied"
    return "read_only" if "READONLY" in told else "error"
