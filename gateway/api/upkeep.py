"""What is done now and then beside the requests, and goes on whatever goes wrong with it."""

import asyncio
from collections.abc import Callable

import structlog

_log = structlog.get_logger("gateway")


async def now_and_then(what: str, do: Callable[[], None], pause_seconds: Callable[[], float]) -> None:
    """Do it, pause, and so on until cancelled. A failure is logged, and those right after it are not: what
    fails once a second would fill the log."""
    fails = False
    while True:
        try:
            do()
            fails = False
        except Exception:
            if not fails:
                _log.exception("this failed, and is tried again", what=what)
            fails = True
        await asyncio.sleep(pause_seconds())
