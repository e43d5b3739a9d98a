"""Which upstreams may serve a request."""

from gateway.policy.parameters import SchedulingParameters
from gateway.policy.routes import MODELS_KNOWN_MAX, Routes
from gateway.policy.upstream_slots import UpstreamSlots
from tests.support.policy_settings import upstream


def engine(name: str, *models: str, accepts: str = "any") -> UpstreamSlots:
    return UpstreamSlots(upstream(name, models=models, accepts=accepts), SchedulingParameters())


def test_by_model_and_by_length() -> None:
    """Those that serve the model; of these the ones that take such prompts, or all where none does."""
    short, long, other = engine("a", "m", accepts="short"), engine("b", "m", accepts="long"), engine("c", "x")
    slots, routes = [short, long, other], Routes()
    found = [routes.for_model(*asked, slots, 0) for asked in (("m", False), ("m", True), ("x", True))]
    assert [route and route.upstreams for route in found] == [(short,), (long,), (other,)]
    assert routes.for_model("y", False, slots, 0) is None
    only_long = Routes().for_model("m", False, [long], 0)
    assert only_long is not None
    assert only_long.upstreams == (long,)


def test_to_one_that_is_avoided_only_where_there_is_no_other() -> None:
    """And the next request, which avoids nobody, may go to both."""
    a, b = engine("a", "m"), engine("b", "m")
    routes = Routes()
    for avoided, expected in (((a,), (b,)), ((a, b), (a, b)), ((), (a, b)), ((b,), (a,))):
        route = routes.for_model("m", False, [a, b], 0, avoided)
        assert route is not None
        assert route.upstreams == expected


def test_names_made_up_by_clients_are_not_kept_for_ever() -> None:
    """An engine may serve whatever it is asked for; all names lead to the one route all the same."""
    routes, slots = Routes(), [engine("a", "*")]
    found = {routes.for_model(f"model {n}", False, slots, 0) for n in range(2 * MODELS_KNOWN_MAX)}
    assert len(found) == len(list(routes)) == 1
    assert len(routes._by_model) == MODELS_KNOWN_MAX


def test_forgotten_ones_are_made_again() -> None:
    """With what serves the model now."""
    a, b = engine("a", "m"), engine("b", "m")
    routes = Routes()
    before = routes.for_model("m", False, [a], 0)
    routes.forget()
    after = routes.for_model("m", False, [a, b], 0)
    assert before is not None
    assert after is not None
    assert (before.upstreams, after.upstreams) == ((a,), (a, b))
    assert list(routes) == [after]
