"""The closed list of endings."""

from gateway.policy.outcome import CALLERS_OWN, Outcome

AGREED = {
    "completed",
    "rejected_rate",
    "rejected_queue_full",
    "queue_timeout",
    "rejected_no_upstream",
    "rejected_draining",
    "unauthorized",
    "forbidden",
    "not_found",
    "bad_request",
    "too_large",
    "upstream_refused",
    "upstream_timeout",
    "upstream_error",
    "upstream_aborted",
    "client_gone_queued",
    "client_gone_streaming",
    "client_stalled",
    "internal_error",
}


def test_the_list_is_the_agreed_one() -> None:
    """Each ending has the name that logs, metrics and answers share, and there is no other."""
    assert sorted(o.value for o in Outcome) == sorted(AGREED)


def test_an_outcome_is_its_name() -> None:
    """An outcome prints, and serves as a label, under its own name."""
    for outcome in Outcome:
        assert f"{outcome}" == outcome.value == outcome.name.lower()


def test_callers_own_endings() -> None:
    """Endings that only the caller causes say nothing of the service."""
    assert {o.value for o in CALLERS_OWN} == {
        "unauthorized",
        "forbidden",
        "not_found",
        "bad_request",
        "too_large",
    }
