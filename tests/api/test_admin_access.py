"""Names under which a gateway without a token may be asked."""

import pytest

from gateway.api.admin_access import is_local_name


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
