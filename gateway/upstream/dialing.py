"""A connection to a host of which nobody knows yet which address answers: Happy Eyeballs (RFC 8305).

A name such as `localhost` stands for several addresses, often of two families, and an engine listens on
one of them only. They are tried in the resolver's order with the families taking turns. The next attempt
begins as soon as one fails, or after `ATTEMPT_DELAY_SECONDS` beside those still under way, and the first to
succeed wins. (asyncio has this built in, uvloop has not.)
"""

import asyncio
import socket
from collections import deque
from collections.abc import Iterable
from itertools import chain, zip_longest
from typing import Any, NamedTuple

ATTEMPT_DELAY_SECONDS = 0.25
"""The RFC's recommendation."""


class Address(NamedTuple):
    family: int
    sockaddr: Any


async def connected_socket(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """Raises OSError."""
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = in_turns(Address(family, sockaddr) for family, _, _, _, sockaddr in found)
    return await first_connected(loop, addresses)


def in_turns(addresses: Iterable[Address]) -> list[Address]:
    """Families alternate, beginning with that of the first address; the order within each is kept."""
    families: dict[int, list[Address]] = {}
    for address in addresses:
        families.setdefault(address.family, []).append(address)
    return [a for a in chain.from_iterable(zip_longest(*families.values())) if a is not None]


async def first_connected(loop: asyncio.AbstractEventLoop, addresses: list[Address]) -> socket.socket:
    """Raises OSError with what each attempt said."""
    if len(addresses) == 1:
        return await _attempt(loop, addresses[0])
    waiting = deque(addresses)
    failures: list[BaseException] = []
    running: set[asyncio.Task[socket.socket]] = set()
    try:
        while waiting or running:
            if waiting:
                running.add(loop.create_task(_attempt(loop, waiting.popleft())))
            done, _ = await asyncio.wait(
                running,
                timeout=ATTEMPT_DELAY_SECONDS if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for attempt in done:
                running.discard(attempt)
                failure = attempt.exception()
                if failure is None:
                    return attempt.result()
                failures.append(failure)
    finally:
        for attempt in running:
            attempt.cancel()
            attempt.add_done_callback(_close_loser)
    if len(failures) == 1 or not all(isinstance(failure, OSError) for failure in failures):
        raise failures[0]
    raise OSError("; ".join(str(failure) for failure in failures))


def _close_loser(attempt: asyncio.Task[socket.socket]) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().close()


async def _attempt(loop: asyncio.AbstractEventLoop, address: Address) -> socket.socket:
    attempt = socket.socket(address.family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        attempt.setblocking(False)
        await loop.sock_connect(attempt, address.sockaddr)
    except BaseException:
        attempt.close()
        raise
    return attempt
