import structlog

from gateway.policy.events import Observer, RatesChanged
from gateway.policy.request import Priority
from gateway.telemetry.fanout import Observers


class Listener(Observer):
    def __init__(self):
        self.heard = []

    def ended(self, event):
        self.heard.append(event)

    def promoted(self, priority):
        self.heard.append(priority)

    def rates_changed(self, event):
        self.heard.append(event)


class Faulty(Observer):
    def ended(self, event):
        raise RuntimeError("no")


def test_all_hear_all(ended):
    """Each kind of event reaches each listener, in order."""
    one, other = Listener(), Listener()
    observers = Observers(one, other)
    events = [ended(), Priority.P1, RatesChanged(0, "static", "x", "up", (), (), {})]
    observers.ended(events[0])
    observers.promoted(events[1])
    observers.rates_changed(events[2])
    assert one.heard == other.heard == events


def test_a_faulty_listener_harms_nobody_and_is_reported_once(ended):
    """The listeners after it hear everything; the log has one entry."""
    listener = Listener()
    observers = Observers(Faulty(), listener)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            observers.ended(ended())
    assert len(listener.heard) == 3
    assert [entry["listener"] for entry in logs] == ["Faulty.ended"]
    assert logs[0]["log_level"] == "error"
