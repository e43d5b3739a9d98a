"""`python -m gateway …`: what operators type, and what they read when something is wrong."""

import asyncio
import hashlib
import socket
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from gateway import __version__
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_engine import scripted_engine

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]


async def run(*arguments: str, say: str | None = None) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *arguments), stdin=PIPE, stdout=PIPE, stderr=PIPE, cwd=ROOT
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate((say or "").encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    async with (
        scripted_engine() as engine,
        running_gateway({"upstreams": [{"name": "gpu0", "url": engine.url}]}) as gateway,
    ):
        yield gateway


async def test_help_and_version() -> None:
    """The commands explain themselves."""
    general, version = await asyncio.gather(run("--help"), run("version"))
    assert general[0] == 0
    for command in ("serve", "mock-gpu", "check-config", "hash-key", "healthcheck"):
        assert command in general[1]
    assert version == (0, f"{__version__}\n", "")


async def test_hash_key() -> None:
    """The digest of a key, given as an argument or on standard input; nothing is not a key."""
    digest = hashlib.sha256(b"a-key").hexdigest()
    given, read, nothing = await asyncio.gather(
        run("hash-key", "a-key"), run("hash-key", say="a-key\n"), run("hash-key", say="\n")
    )
    assert given == read == (0, f"{digest}\n", "")
    assert nothing[0] != 0
    assert "empty" in nothing[2]


async def test_healthcheck(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Status 0 for a gateway that lives, another one with the reason for one that does not."""
    config, dead = tmp_path / "gateway.yaml", tmp_path / "dead.yaml"
    config.write_text(yaml.safe_dump({"server": {"port": gateway.port}}))
    dead.write_text(yaml.safe_dump({"server": {"port": 1}}))
    lives, ready, gone = await asyncio.gather(
        run("healthcheck", "--config", str(config)),
        run("healthcheck", "--ready", "--config", str(config)),
        run("healthcheck", "--config", str(dead)),
    )
    assert (lives[0], ready[0], gone[0]) == (0, 0, 1)
    assert ready[1] == f"{gateway.api}/readyz: ok\n"
    assert "http://127.0.0.1:1/healthz" in gone[2]


async def test_a_good_configuration(tmp_path: Path) -> None:
    """It is said in one line what would be started."""
    config = tmp_path / "gateway.yaml"
    config.write_text(yaml.safe_dump({"keys_file": str(ROOT / "config" / "keys.example.yaml")}))
    shipped, keyed = await asyncio.gather(
        run("check-config", "config/gateway.yaml"), run("check-config", str(config))
    )
    assert shipped[0] == keyed[0] == 0
    assert "gpu0 (mock://seed_32k)" in shipped[1]
    assert "Open to all" in shipped[1]
    assert "2 keys" in keyed[1]


async def test_a_wrong_configuration(tmp_path: Path) -> None:
    """The file and the key are named, for one line each, and nothing is started."""
    config, broken = tmp_path / "gateway.yaml", tmp_path / "broken.yaml"
    config.write_text("classes: {P0: {shares: 0.5}}\nserver: {port: high}\n")
    broken.write_text("server: {port: 1")
    wrong, unreadable, missing = await asyncio.gather(
        run("serve", "--config", str(config)),
        run("check-config", str(broken)),
        run("check-config", str(tmp_path / "none.yaml")),
    )
    assert {wrong[0], unreadable[0], missing[0]} == {2}
    lines = wrong[2].splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{config}: ") for line in lines)
    assert f"{config}: classes.P0.shares: unknown key, did you mean share?" in lines
    assert any("server.port" in line and "high" in line for line in lines)
    assert f"{broken}: line 1" in unreadable[2]
    assert "none.yaml: there is no such file" in missing[2]
    assert not any("Traceback" in text for result in (wrong, unreadable, missing) for text in result[1:])


async def test_a_keys_file_that_is_wrong(tmp_path: Path) -> None:
    """A key in clear text is refused without being shown."""
    config, keys = tmp_path / "gateway.yaml", tmp_path / "keys.yaml"
    config.write_text("keys_file: keys.yaml\n")
    keys.write_text("- {id: one, sha256: my-clear-text-key}\n")
    status, out, err = await run("serve", "--config", str(config))
    assert status == 2
    assert str(keys) in err
    assert "sha256" in err
    assert "my-clear-text-key" not in out + err


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """The address is named, be it the tenants' or the operators', and no engine is started for it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        configs = []
        for port in ("port", "operations_port"):
            configs.append(tmp_path / f"{port}.yaml")
            ports = {"port": 0, "operations_port": 0, port: number}
            configs[-1].write_text(yaml.safe_dump({"server": ports}))
        results = await asyncio.gather(*(run("serve", "--config", str(config)) for config in configs))
    assert results == [(3, "", f"cannot listen on 127.0.0.1:{number}: Address already in use\n")] * 2
