"""The store of the shared budget: Redis or Valkey through redis-py, one script call for each renewal.

Every failure is told as `StoreFailed` with a reason out of a short list; nothing is tried twice. A script
that the server does not know is loaded and called again by redis-py. All keys carry the prefix as their hash
tag, so a cluster keeps them in one slot, and all are named to the script; where the slot is at another node
of the cluster, the calls go there until one fails.
"""

import asyncio
from collections.abc import Sequence
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
        self._address = {name: self._kwargs[name] for name in ("host", "port") if name in self._kwargs}
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
            async with asyncio.timeout(self._seconds):
                try:
                    return cast(list[bytes], await script(keys=self._keys, args=arguments))
                except exceptions.MovedError as moved:
                    await self._go_to(host=moved.host, port=moved.port)
                    return cast(list[bytes], await script(keys=self._keys, args=arguments))
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            # the next call is on a new connection: behind the same address there may be another server by now
            await self._go_to(**self._address)
            raise StoreFailed(_reason(error), str(error) or type(error).__name__) from error

    async def _go_to(self, **address: Any) -> None:
        self._kwargs.update(address)
        await self._redis.connection_pool.disconnect()
        self._redis.connection_pool.reset()  # type: ignore[no-untyped-call]  # kept connections know their address


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
