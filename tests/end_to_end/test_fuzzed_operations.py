"""The project's own OpenAPI documents, taken at their word by schemathesis.

`FUZZ_EXAMPLES=1000` in the environment makes it so many of each port instead of some dozens.
"""

import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

import anyio
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.scripted_engine import scripted_engine

pytestmark = pytest.mark.anyio

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
TOKEN = "fuzz-operations-token"
ALLOWED = {"authorization": f"Bearer {TOKEN}"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
async def gateway() -> AsyncIterator[GatewayProcess]:
    """At the end it must be quiet, and must not have printed a traceback."""
    async with scripted_engine() as engine:
        given = {
            "upstreams": [{"name": "gpu0", "url": engine.url, "models": ["mock-gpu"]}],
            "server": {"operations_token": TOKEN},
            "capacity": {"tokens_per_second": 1, "burst_seconds": 10**9},
        }
        async with running_gateway(given, token=TOKEN) as gateway:
            yield gateway


async def cases(url: str, headers: Mapping[str, str] | None = None) -> st.SearchStrategy[Any]:
    """Requests to all operations of the document at this address; for those that say what a parameter may be
    also such as it may not be."""
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        page = (await client.get(url + "/openapi.json")).raise_for_status().json()
    page["paths"].pop("/admin/drain", None)  # there is no way back from it
    operations = [found.ok() for found in schemathesis.openapi.from_dict(page).get_all_operations()]
    right = [operation.as_strategy() for operation in operations]
    wrong = [
        operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
        for operation in operations
        if any("enum" in parameter.definition.get("schema", {}) for parameter in operation.headers)
    ]
    return st.one_of(right + wrong)


def fuzz(given_cases: st.SearchStrategy[Any], usual: int, url: str, headers: dict[str, str]) -> None:
    """Ask with one after the other, in a thread: meanwhile the gateway's output is read."""

    @settings(
        max_examples=EXAMPLES or usual,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(given_cases)
    def one(case: Any) -> None:
        response = case.call(base_url=url, session=session, headers=headers)
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as failures:  # no Exception: it would end the event loop's thread with the test
            raise AssertionError("\n".join(map(str, failures.exceptions))) from None

    with requests.Session() as session:
        session.trust_env = False
        one()


async def test_the_operators_port(gateway: GatewayProcess) -> None:
    """Each operation answers as documented, whatever it is asked with; a reload as well."""
    given = await cases(gateway.operations, ALLOWED)
    await anyio.to_thread.run_sync(fuzz, given, 25, gateway.operations, ALLOWED)


async def test_the_operators_port_without_its_token(gateway: GatewayProcess) -> None:
    """Strangers get documented answers too."""
    given = await cases(gateway.operations, ALLOWED)
    await anyio.to_thread.run_sync(fuzz, given, 20, gateway.operations, {})


async def test_the_tenants_port(gateway: GatewayProcess) -> None:
    """No documented operation ends in a 5xx, or otherwise than is documented."""
    given = await cases(gateway.api)
    await anyio.to_thread.run_sync(fuzz, given, 50, gateway.api, {})
