"""One structured line for each change of the class rates: which law, why, by what figures, to what."""

import structlog

from gateway.policy.events import Observer, RatesChanged
from gateway.policy.parameters import MILLITOKENS
from gateway.policy.request import PRIORITIES


class ChangeLog(Observer):
    """To be made after `configure_logging`, whose output and level it keeps until `take_logging`."""

    def __init__(self) -> None:
        self.take_logging()

    def take_logging(self) -> None:
        """Write as logging is configured now."""
        self._info = structlog.get_logger().bind().info

    def rates_changed(self, event: RatesChanged) -> None:
        self._info(
            "rates changed" if event.applied else "rates would change",
            law=event.law,
            reason=event.reason,
            direction=event.direction,
            upstreams=list(event.upstreams),
            old_capacity=sum(event.old_rates) / MILLITOKENS,
            capacity=sum(event.new_rates) / MILLITOKENS,
            rates={p.name: event.new_rates[p] / MILLITOKENS for p in PRIORITIES},
            **{name: round(value, 4) for name, value in event.inputs.items()},
        )
