"""Pieces of PromQL that name only metrics which the gateway exports."""

from gateway.telemetry.catalogue import PREFIX, SERIES_NAMES

GATEWAYS = 'job=~"$job", instance=~"$instance"'
"""The matchers that every query has."""

BY_CLASS = 'priority=~"$priority"'
BY_UPSTREAM = 'upstream=~"$upstream"'


def series(name: str, *matchers: str) -> str:
    """A selector of the gateways that are looked at. `name` without the prefix, or a foreign name in full.
    Raises ValueError for one of ours that does not exist."""
    own = PREFIX + name
    if own not in SERIES_NAMES and not name.startswith(("process_", "scrape_", "up")):
        raise ValueError(f"the gateway exports no series {own}")
    full = own if own in SERIES_NAMES else name
    return f"{full}{{{', '.join([GATEWAYS, *matchers])}}}"


def total(by: str, name: str, *matchers: str) -> str:
    """The sum of a gauge by these labels."""
    return f"sum by ({by}) ({series(name, *matchers)})"


def greatest(by: str, name: str, *matchers: str) -> str:
    return f"max by ({by}) ({series(name, *matchers)})"


def rate(by: str, name: str, *matchers: str, window: str = "$__rate_interval") -> str:
    """The rate of a counter, per second, by these labels."""
    return f"sum by ({by}) (rate({series(name, *matchers)}[{window}]))"


def ratio(part: str, whole: str) -> str:
    """Absent where there is nothing to be a part of."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, by: str, histogram: str, *matchers: str) -> str:
    labels = ", ".join(["le", *by.split()])
    return f"histogram_quantile({q:g}, {rate(labels, f'{histogram}_bucket', *matchers)})"


def weighted(by: str, shares: str, weights: str) -> str:
    """The mean of shares that every gateway tells by itself, each counting by its weight: the share of all
    together. `weights` are by (job, instance, priority), as the shares are and maybe by more. Absent where
    there is no weight."""
    match = "* on (job, instance, priority) group_left ()"
    counted = f"sum by ({by}) (({shares} >= bool 0) {match} {weights})"
    return ratio(f"sum by ({by}) ({shares} {match} {weights})", counted)


def kept_at_bound(by: str, histogram: str, bounds: str, *matchers: str, window: str) -> str:
    """The part of a histogram's values up to a bound of their own, seconds by the labels `by`. It has to be
    one of the histogram's buckets; then it is exact and adds up over gateways."""
    # As a label a whole number is written "1.0"; count_values makes it "1".
    le = f'label_replace(count_values by ({by}) ("le", {bounds}), "le", "$1.0", "le", "([0-9]+)")'
    within = rate(f"{by}, le", f"{histogram}_bucket", *matchers, window=window)
    return ratio(
        f"sum by ({by}) ({within} and on ({by}, le) {le})",
        rate(by, f"{histogram}_count", *matchers, window=window),
    )


def increase_by_bucket(histogram: str, *matchers: str) -> str:
    """What a heatmap is drawn from."""
    return f"sum by (le) (increase({series(f'{histogram}_bucket', *matchers)}[$__rate_interval]))"
