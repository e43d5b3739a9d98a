"""An engine behind TLS, by the configuration alone."""

from pathlib import Path

import pytest

from tests.support.certificates import self_signed, server_context
from tests.support.gateway_process import running_gateway
from tests.support.raw_client import ask, chat, post_chat
from tests.support.scripted_engine import ScriptedEngine, whole_answer
from tests.support.scripted_upstream import ScriptedConnection, ScriptedUpstream

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("verify", [True, False])
async def test_an_engine_behind_tls(tmp_path: Path, verify: bool) -> None:
    """Served where its certificate is in the file, and also unchecked, which is said at start."""
    certificate = self_signed(tmp_path)

    async def handle(connection: ScriptedConnection) -> None:
        await engine.handle(connection)

    upstream = ScriptedUpstream(handle, tls=server_context(certificate))
    engine = ScriptedEngine(upstream)
    async with upstream:
        trust = {"tls_ca_file": str(certificate)} if verify else {"tls_verify": False}
        url = f"https://localhost:{upstream.port}"
        async with running_gateway({"upstreams": [{"name": "gpu0", "url": url, **trust}]}) as gateway:
            response = await ask(gateway.port, post_chat(chat()))
            assert (response.status, response.body) == (200, whole_answer())
            assert engine.last.header("host") == f"localhost:{upstream.port}"
            warned = [line for line in gateway.log if "tls_verify" in line["event"]]
            assert [line["level"] for line in warned] == ([] if verify else ["warning"])


async def test_an_engine_that_nobody_vouches_for(tmp_path: Path) -> None:
    """It is not up: nothing is sent to it, no key either."""
    certificate = self_signed(tmp_path)
    upstream = ScriptedUpstream(lambda connection: engine.handle(connection), tls=server_context(certificate))
    engine = ScriptedEngine(upstream)
    async with upstream:
        url = f"https://localhost:{upstream.port}"
        settings = {"upstreams": [{"name": "gpu0", "url": url, "api_key": "secret"}]}
        async with running_gateway(settings, ready=False) as gateway:
            response = await ask(gateway.port, post_chat(chat()))
            assert response.status in (502, 503)
            assert engine.requests == engine.probes == []
