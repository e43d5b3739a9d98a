"""One event loop for all of this folder, so that modules can share a gateway."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
