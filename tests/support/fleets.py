"""Replicas of a fleet as tests need them: what they ask, what they got."""

from collections.abc import Sequence

from gateway.fleet.contract import AllowanceDemand, Demand, Flow, PlacesDemand, PoolDemand, Share

BUDGET = (600_000, 350_000, 50_000)
CEILINGS = (1.0, 0.7, 0.3)


def pool_demand(
    *rates: int, tenant: str = "t", budget: tuple[int, ...] = BUDGET, active: Sequence[bool] | None = None
) -> PoolDemand:
    """One tenant that asks for these rates, by class."""
    rates = (*rates, 0, 0, 0)[:3]
    flows = tuple((Flow(tenant, rate),) if rate else () for rate in rates)
    return PoolDemand("gpu", budget, CEILINGS, tuple(active or (rate > 0 for rate in rates)), flows)


def demand(
    *rates: int, tenant: str = "t", places: PlacesDemand | None = None, bucket: AllowanceDemand | None = None
) -> Demand:
    return Demand(
        pools=(pool_demand(*rates, tenant=tenant),),
        places=() if places is None else (places,),
        allowances=() if bucket is None else (bucket,),
    )


class ScriptedGateway:
    """Asks for what the test sets, and keeps what it got."""

    def __init__(self, asks: Demand) -> None:
        self.asks = asks
        self.share: Share | None = None
        self.signals: list[str] = []

    def demand(self) -> Demand:
        return self.asks

    def take(self, share: Share) -> None:
        self.share = share
        self.signals.extend(share.signals)

    @property
    def rates(self) -> tuple[int, ...]:
        assert self.share is not None
        return self.share.pools[0].rates
