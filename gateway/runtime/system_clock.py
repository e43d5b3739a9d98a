"""The real clock: monotonic, so that steps of the wall clock change nothing."""

import time


class SystemClock:
    now = staticmethod(time.monotonic_ns)
