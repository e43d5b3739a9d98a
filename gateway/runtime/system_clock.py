"""The real clock: monotonic, so that steps of the wall clock change nothing."""

import time


class SystemClock:
    def now(self) -> int:
        return time.monotonic_ns()
