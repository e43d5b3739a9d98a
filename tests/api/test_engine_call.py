"""What a request's ending shows of its engine."""

import pytest

from gateway.api.engine_call import shows_service
from gateway.policy.outcome import Outcome

FAILED = {Outcome.UPSTREAM_REFUSED, Outcome.UPSTREAM_TIMEOUT, Outcome.UPSTREAM_ABORTED}


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.UPSTREAM_ERROR}))
def test_every_ending(outcome: Outcome) -> None:
    """Complete answers speak for an engine, missing and broken ones against it, whatever status they began
    with; what clients and the gateway did says nothing."""
    for status in (None, 200):
        expected = True if outcome is Outcome.COMPLETED else False if outcome in FAILED else None
        assert shows_service(outcome, status) is expected


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ((301, 400, 401, 404, 408, 413, 422, 429, 499), True),
        ((500, 502, 504, 505, 529), False),
        ((501, 503, 200, None), None),
    ],
)
def test_errors_of_the_engine(statuses: tuple[int | None, ...], expected: bool | None) -> None:
    """It serves if it finds fault with the request, and does not if with itself; want of room, a kind of
    request it does not know, and an error event inside a stream are neither."""
    for status in statuses:
        assert shows_service(Outcome.UPSTREAM_ERROR, status) is expected
