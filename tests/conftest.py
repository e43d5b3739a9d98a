"""For all tests: how long a property test may take to make its examples is the machine's business, and how
the tests were started is no business of the processes that they start."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it runs in the background deaf to Ctrl-C, and all that this starts would be too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
