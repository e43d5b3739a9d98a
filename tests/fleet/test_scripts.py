"""The scripts in a real store against the ledger: the same calls at the same times, the same answers."""

from collections.abc import Iterator
from importlib.resources import files

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.fleet.contract import AllowanceDemand, Demand, Flow, PlacesDemand, PoolDemand
from gateway.fleet.ledger import Ledger
from gateway.fleet.messages import packed, read_granted
from gateway.fleet.standing import FleetRules, Standing
from gateway.fleet.store import KEYS
from tests.support.fleets import BUDGET, CEILINGS
from tests.support.store_servers import BINARIES, store_server

BEGIN_US = 1_700_000_000_000_000

RATES = st.integers(0, 2_000_000)
FLOWS = st.lists(
    st.builds(Flow, st.sampled_from(["a", "b", "gemeinsam ü", "1"]), RATES, st.integers(1, 9)),
    max_size=3,
    unique_by=lambda flow: flow.tenant,
).map(tuple)
POOLS = st.builds(
    PoolDemand,
    st.sampled_from(["gpu", "embed"]),
    st.sampled_from([BUDGET, (500_000, 1, 77)]),
    st.sampled_from([CEILINGS, (1.0, 0.5, 0.4)]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.tuples(FLOWS, FLOWS, FLOWS),
    st.sampled_from([0, 1_000_000, 500_078]),
)
PLACES = st.builds(
    lambda name, limit, in_use, more: PlacesDemand(name, limit, in_use, in_use + more),
    st.just("key:k"),
    st.integers(0, 20),
    st.integers(0, 12),
    st.integers(0, 9),
)
ENGINES_PLACES = st.builds(
    lambda limit, in_use, wanted: PlacesDemand("places:gpu0", limit, in_use, sum(wanted), tuple(wanted)),
    st.integers(0, 20),
    st.integers(0, 12),
    st.lists(st.integers(0, 12), min_size=3, max_size=3),
)
ALLOWANCES = st.builds(
    AllowanceDemand,
    st.sampled_from(["acme", "zeta"]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**5),
    st.integers(0, 10**5),
)
DEMANDS = st.builds(
    Demand,
    st.lists(POOLS, min_size=1, max_size=2, unique_by=lambda pool: pool.pool).map(tuple),
    st.lists(st.one_of(PLACES, ENGINES_PLACES), max_size=2, unique_by=lambda told: told.name).map(tuple),
    st.lists(ALLOWANCES, max_size=2, unique_by=lambda told: told.name).map(tuple),
)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        DEMANDS,
        st.one_of(st.integers(0, 300_000), st.just(10_500_000)),  # microseconds
        st.sampled_from(["heard"] * 8 + ["lost", "leaves", "emptied"]),
    ),
    max_size=25,
)


@pytest.fixture(scope="module", params=BINARIES)
def client(request: pytest.FixtureRequest) -> "Iterator[redis.Redis]":
    with store_server(request.param) as server, server.client() as connected:
        yield connected


@given(steps=STEPS)
@settings(max_examples=60)
def test_the_script_computes_what_the_ledger_computes(
    client: redis.Redis, steps: list[tuple[int, Demand, int, str]]
) -> None:
    """To the last bit, through lost answers, ended leases, replicas that leave, and a store that was emptied;
    and the sums that the script keeps are those of what it counts for each."""
    source = (files("gateway.fleet") / "renew.lua").read_text(encoding="utf-8")
    renew = client.register_script(source.replace("redis.call('TIME')", "{ARGV[3], ARGV[4]}"))
    leave = client.register_script((files("gateway.fleet") / "leave.lua").read_text(encoding="utf-8"))
    keys = [f"{{test}}:{key}" for key in KEYS]
    client.delete(*keys)
    ledger, standings, now = Ledger(), [Standing(FleetRules()) for _ in range(4)], BEGIN_US
    for who, demand, later_us, happens in steps:
        now += later_us
        name = f"r{who}"
        if happens == "emptied":
            ledger = Ledger()
            client.delete(*keys)
        if happens == "leaves":
            ledger.leave(name)
            leave(keys=keys, args=[name])
            standings[who] = Standing(FleetRules())
            continue
        renewal = standings[who].renewal(demand, now / 1e6)
        expected = ledger.renew(now, name, renewal)
        answer = renew(keys=keys, args=[name, packed(renewal), now // 10**6, now % 10**6])
        assert read_granted(answer[0]) == expected
        if happens != "lost":
            standings[who].answered(expected, (), now / 1e6, now / 1e6)
        for told, amount in client.hgetall(keys[2]).items():
            assert int(amount) == ledger.held(told.decode()), told
