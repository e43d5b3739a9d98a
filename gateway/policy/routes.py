"""Which upstreams may serve a request, and who waits for them: its route, found by the model it asks for."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gateway.policy.parameters import UpstreamParameters
from gateway.policy.request import Ticket
from gateway.policy.upstream_slots import UpstreamSlots

MODELS_KNOWN_MAX = 256
"""Of which the route is kept; an upstream may serve whatever it is asked for."""


class Route:
    """The upstreams that may serve a request, and the line of those who wait for them.

    Long prompts have a route of their own, so that one waiting for the lane does not hold up the rest.
    """

    def __init__(self, upstreams: Sequence[UpstreamSlots], long: bool) -> None:
        self.upstreams = tuple(upstreams)
        self.long = long
        self.down_since: int | None = None
        self.waiting: OrderedDict[int, Ticket] = OrderedDict()  # by arrival, throttled ones included

    @property
    def healthy(self) -> bool:
        return any(upstream.healthy for upstream in self.upstreams)


class Routes:
    """The routes to the upstreams of one pool, made as they are asked for. Until `forget` there is one for
    the same upstreams, and the upstreams are the same."""

    def __init__(self) -> None:
        self._routes: dict[tuple[tuple[UpstreamSlots, ...], bool], Route] = {}
        self._by_model: dict[tuple[str, bool], Route] = {}
        self.down: list[Route] = []
        """Those whose upstreams are all down, in the order they were made."""

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def serve(self, model: str, slots: Sequence[UpstreamSlots]) -> bool:
        known = (model, False) in self._by_model
        return known or any(serves(upstream.parameters, model) for upstream in slots)

    def for_model(
        self,
        model: str,
        is_long: bool,
        slots: Sequence[UpstreamSlots],
        now: int,
        avoided: Sequence[UpstreamSlots] = (),
    ) -> Route | None:
        """Where requests for a model may go among these; None when none of them serves it. To `avoided` ones
        only if there are no others."""
        if not avoided and (known := self._by_model.get((model, is_long))) is not None:
            return known
        serving = [upstream for upstream in slots if serves(upstream.parameters, model)]
        wanted = "long" if is_long else "short"
        fitting = [s for s in serving if s.parameters.accepts in ("any", wanted)] or serving
        fitting = [s for s in fitting if s not in avoided] or fitting
        if not fitting:
            return None
        route = self.to(fitting, is_long, now)
        if not avoided and len(self._by_model) < MODELS_KNOWN_MAX:
            self._by_model[model, is_long] = route
        return route

    def to(self, upstreams: Sequence[UpstreamSlots], is_long: bool, now: int) -> Route:
        """The one route to these upstreams."""
        key = (tuple(upstreams), is_long)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(upstreams, is_long)
            if not route.healthy:
                route.down_since = now
                self.down.append(route)
        return route

    def health_changed(self, now: int) -> None:
        for route in self:
            if route.healthy:
                route.down_since = None
            elif route.down_since is None:
                route.down_since = now
        self.down = [route for route in self if route.down_since is not None]

    def forget(self) -> None:
        """The upstreams, or what they serve, are others now: those who wait are to be given new routes."""
        self._routes = {}
        self._by_model = {}
        self.down = []


def serves(upstream: UpstreamParameters, model: str) -> bool:
    return model in upstream.models or "*" in upstream.models
