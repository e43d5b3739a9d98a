"""How many requests may be sent a second time: a fraction of all, so that retries never become the load.

A token bucket that is filled by requests instead of time (Finagle's and Envoy's retry budget): each request
adds `fraction`, each retry takes 1; it begins with `RESERVE` and never holds more. So among any n requests

    retries ≤ fraction × n + RESERVE

The count is in whole millionths, so that ten requests at 0.1 pay exactly one retry.
"""

RESERVE = 10
"""Retries saved up at most, and there at the start: an engine that goes costs some before it is left."""

_RETRY = 1_000_000


class RetryBudget:
    def __init__(self, fraction: float) -> None:
        """A fraction of 0 allows none at all."""
        self._take(fraction)
        self._saved = self._limit

    def reconfigure(self, fraction: float) -> None:
        """Another fraction from now on; what was saved stays, as far as it may."""
        self._take(fraction)
        self._saved = min(self._saved, self._limit)

    def _take(self, fraction: float) -> None:
        self._per_request = round(fraction * _RETRY)
        self._limit = RESERVE * _RETRY if self._per_request else 0

    def request(self) -> None:
        """One more request was sent, for the first time."""
        self._saved = min(self._saved + self._per_request, self._limit)

    def take(self) -> bool:
        """Pay for one retry, if there is enough."""
        if self._saved < _RETRY:
            return False
        self._saved -= _RETRY
        return True
