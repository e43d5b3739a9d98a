"""What a request used is freed when it ends, and not only when the garbage collector comes by."""

import asyncio
import gc
import json
from typing import Any

import pytest

from gateway.api.app import Gateway
from gateway.api.configuration import Configuration
from gateway.api.inference import TenantApp, create_tenant_app
from gateway.settings import Settings
from tests.support.scripted_engine import DONE, FINISH, ROLE, plain, scripted_engine, streaming, token

pytestmark = pytest.mark.anyio

REQUESTS = 5


async def asked(app: TenantApp, *, stream: bool, model: str = "m") -> int:
    """The status of the answer to one chat request."""
    body = json.dumps({"model": model, "stream": stream, "messages": [{"role": "user", "content": "x"}]})
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-length", b"%d" % len(body))],
    }
    told: list[dict[str, Any]] = []
    to_come = [{"type": "http.request", "body": body.encode()}]

    async def receive() -> dict[str, Any]:
        return to_come.pop() if to_come else await asyncio.Future()

    async def send(message: Any) -> None:
        told.append(message)

    await app(scope, receive, send)
    status: int = told[0]["status"]
    return status


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_nothing_of_a_request_is_left_to_the_garbage_collector(stream: bool) -> None:
    """Objects that hold each other would be: hundreds of requests a second would have it at work all day."""
    async with scripted_engine() as engine:
        upstreams = [{"name": "gpu0", "url": engine.url, "models": ["m"]}]
        gateway = Gateway(Configuration(Settings.model_validate({"upstreams": upstreams})))
        engine.play = streaming(ROLE, token("one"), token("two"), FINISH, DONE) if stream else plain()
        app = create_tenant_app(await gateway.start())
        try:
            assert await asked(app, stream=stream) == 200
            assert await asked(app, stream=stream, model="none") == 404
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.disable()
            for _ in range(REQUESTS):
                await asked(app, stream=stream)
                await asked(app, stream=stream, model="none")
            gc.collect()
            left = {
                type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("gateway.")
            }
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            await gateway.stop()
    assert left == set()
