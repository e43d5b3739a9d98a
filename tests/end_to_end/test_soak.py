"""`make soak` in small: the same traffic and the same checks, for some seconds."""

import pytest

from tests.soak.run import Options, soak

pytestmark = pytest.mark.anyio

OPTIONS = Options(
    seconds=8,
    connections=30,
    think_seconds=0.3,
    restart_every_seconds=3,
    memory_growth_max=0.3,  # in so short a time it is still warming up
)


@pytest.mark.slow
async def test_everything_at_once() -> None:
    """Clients and engines that misbehave in every way leave nothing behind, and all books agree."""
    report = await soak(OPTIONS, lambda line: None)
    assert [check for check in report.checks if not check.holds] == []
