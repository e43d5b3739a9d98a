"""Names under which a gateway without a token may be asked, and who comes without one to a gateway with."""

import pytest
import structlog
from fastapi import HTTPException, Request

from gateway.api.admin_access import Guard, is_local_name
from gateway.policy.clock import NANOSECONDS_PER_SECOND, ManualClock

pytestmark = pytest.mark.anyio
TOKEN = "the-operators-token"


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8001",
        "localhost:8001",
        "[::1]:8001",
        "[::1]",
        "10.1.2.3:80",
        "gateway",
        "a.localhost",
    ],
)
def test_addresses_and_names_without_a_dot_are_local(host: str) -> None:
    """Public DNS cannot make any of these lead here."""
    assert is_local_name(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8001",
        "127.0.0.1.evil.example",
        "localhost.evil.example:8001",
        "localhost.",
    ],
)
def test_names_that_anybody_could_point_here_are_not(host: str) -> None:
    assert not is_local_name(host)


async def test_strangers_are_logged_once_a_second() -> None:
    """With how many came since the last line, how many of them with a wrong token, and from where the last;
    never with a token, and never those who have the right one."""
    clock = ManualClock(0)
    guard = Guard(TOKEN, clock)

    async def ask(port: int, given: str | None) -> None:
        request = Request({"type": "http", "headers": [], "client": ("10.0.0.9", port)})
        if given == f"Bearer {TOKEN}":
            await guard.reads(request, given)
            return
        with pytest.raises(HTTPException) as refused:
            await guard.reads(request, given)
        assert refused.value.status_code == 401

    with structlog.testing.capture_logs() as lines:
        await ask(1, "Bearer guess-0")
        for number in range(50):
            await ask(2, f"Bearer guess-{number}")
        await ask(3, f"Bearer {TOKEN}")
        clock.advance(NANOSECONDS_PER_SECOND)
        await ask(4, f"Bearer {TOKEN}")
        await ask(5, None)
    assert [(line["requests"], line["wrong_tokens"], line["last_from"]) for line in lines] == [
        (1, 1, "10.0.0.9:1"),
        (51, 50, "10.0.0.9:5"),
    ]
    assert {line["log_level"] for line in lines} == {"warning"}
    assert "guess" not in repr(lines)
    assert TOKEN not in repr(lines)
