import structlog

from gateway.policy.engine_load import EngineLoad
from gateway.policy.events import Observer, RatesChanged
from gateway.policy.request import Priority
from gateway.telemetry.fanout import Observers


class Listener(Observer):
    """Remembers what it was told, and by which method."""

    def __init__(self):
        self.heard = []

    def ended(self, event):
        self.heard.append(("ended", event))

    def promoted(self, priority):
        self.heard.append(("promoted", priority))

    def rates_changed(self, event):
        self.heard.append(("rates_changed", event))

    def health_changed(self, upstream, healthy, at):
        self.heard.append(("health_changed", upstream, healthy, at))

    def trial_allowed(self, upstream, at):
        self.heard.append(("trial_allowed", upstream, at))

    def load_told(self, upstream, load, at):
        self.heard.append(("load_told", upstream, load, at))

    def queue_full(self, upstream, at):
        self.heard.append(("queue_full", upstream, at))


class Faulty(Observer):
    def ended(self, event):
        raise RuntimeError("no")

    def health_changed(self, upstream, healthy, at):
        raise RuntimeError("no")


class Curious(Observer):
    wants_details = True


def test_all_hear_all(ended):
    """Each kind of event reaches each listener, in order."""
    one, other = Listener(), Listener()
    observers = Observers(one, other)
    told = [
        ("ended", ended()),
        ("promoted", Priority.P1),
        ("rates_changed", RatesChanged(0, "static", "x", "up", (), (), {})),
        ("health_changed", "gpu0", False, 7),
        ("trial_allowed", "gpu0", 7),
        ("load_told", "gpu0", EngineLoad(waiting=3), 8),
        ("queue_full", "gpu0", 9),
    ]
    for method, *facts in told:
        getattr(observers, method)(*facts)
    assert one.heard == other.heard == told


def test_nothing_that_can_be_heard_is_kept_back():
    """Whatever an observer may be told, the fan-out hands on."""
    methods = {name for name, value in vars(Observer).items() if callable(value)}
    assert methods <= vars(Observers).keys()


def test_details_are_wanted_where_one_listener_wants_them():
    """They cost something, so that they are not filled in for nobody."""
    assert not Observers().wants_details
    assert not Observers(Listener(), Observer()).wants_details
    assert Observers(Listener(), Curious()).wants_details


def test_a_faulty_listener_harms_nobody_and_is_reported_once(ended):
    """The listeners after it hear everything; the log has one entry for each of its methods."""
    listener = Listener()
    observers = Observers(Faulty(), listener)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            observers.ended(ended())
            observers.health_changed("gpu0", True, 0)
    assert len(listener.heard) == 6
    assert [entry["listener"] for entry in logs] == ["Faulty.ended", "Faulty.health_changed"]
    assert logs[0]["log_level"] == "error"
