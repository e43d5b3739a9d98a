"""The shared budget against a real Redis and a real Valkey, with everything that can befall them."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions

from gateway.fleet.contract import Demand, State
from gateway.fleet.membership import Membership
from gateway.fleet.standing import Change, FleetRules
from gateway.fleet.store import KEYS, SharedBudget, StoreFailed
from tests.support.fleets import BUDGET, ScriptedGateway, demand
from tests.support.store_servers import BINARIES, StoreServer, store_server

pytestmark = pytest.mark.anyio

RULES = FleetRules(slice_seconds=0.02, call_seconds_max=2.0, retry_seconds=0.02)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=BINARIES)
def running(request: pytest.FixtureRequest) -> Iterator[StoreServer]:
    with store_server(request.param) as server:
        yield server


@pytest.fixture
def server(running: StoreServer) -> StoreServer:
    """Empty, writable, without a password."""
    with running.client() as client:
        client.flushall()
        client.script_flush()
    return running


class Script:
    """In place of a script at a server: raises what it is told, one after the other, and keeps where to the
    calls would have gone."""

    def __init__(self, budget: SharedBudget, *raises: Exception) -> None:
        self._budget, self._raises = budget, list(raises)
        self.sent_to: list[dict[str, Any]] = []

    async def __call__(self, keys: list[str], args: list[Any]) -> list[bytes]:
        kwargs = self._budget._redis.connection_pool.connection_kwargs
        self.sent_to.append({name: kwargs[name] for name in ("host", "port", "path") if name in kwargs})
        raise self._raises.pop(0)


async def fails(budget: SharedBudget, script: Script) -> StoreFailed:
    budget._leave = script  # type: ignore[assignment]
    with pytest.raises(StoreFailed) as failed:
        await budget.leave()
    return failed.value


@pytest.mark.parametrize(
    ("url", "moved_to", "configured", "followed_to"),
    [
        ("redis://store:6400/0", "10.0.0.2:7001", {"host": "store", "port": 6400}, ("10.0.0.2", 7001)),
        ("redis://store", "10.0.0.2:7001", {"host": "store"}, ("10.0.0.2", 7001)),
        ("rediss://:secret@store", ":7001", {"host": "store"}, ("store", 7001)),
        ("redis://", "10.0.0.2:7001", {}, ("10.0.0.2", 7001)),
        ("redis://:6400", ":7001", {"port": 6400}, (None, 7001)),
    ],
)
async def test_a_redirect_is_followed_until_a_call_fails(
    url: str, moved_to: str, configured: dict[str, Any], followed_to: tuple[str | None, int]
) -> None:
    """Then the configured address holds again, all of it; a node that names no host means its own."""
    budget = SharedBudget(url, "r0")
    gone = exceptions.ConnectionError("gone")
    script = Script(budget, exceptions.MovedError(f"3999 {moved_to}"), gone, gone)
    assert (await fails(budget, script)).reason == "unreachable"
    await fails(budget, script)
    first, second, third = script.sent_to
    assert first == third == configured
    assert (second.get("host"), second["port"]) == followed_to


async def test_a_socket_of_this_machine_is_not_left_for_another_node() -> None:
    """There the address is a path, to which a port of somebody else would not fit."""
    budget = SharedBudget("unix:///run/store.sock", "r0")
    script = Script(budget, exceptions.MovedError("3999 10.0.0.2:7001"))
    failure = await fails(budget, script)
    assert (failure.reason, failure.message) == ("error", "MovedError: 3999 10.0.0.2:7001")
    assert script.sent_to == [{"path": "/run/store.sock"}]


@pytest.mark.parametrize(
    "closing", [exceptions.TimeoutError("closing"), OSError("reset"), RuntimeError("loop"), None]
)
async def test_a_connection_that_does_not_close_changes_nothing(
    closing: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has failed for its own reason, within its time, and the next one is on a new connection."""
    budget = SharedBudget("redis://store", "r0", call_seconds_max=0.1)
    pool, resets = budget._redis.connection_pool, list[str]()

    async def disconnect() -> None:
        if closing is None:
            await asyncio.Event().wait()
        raise closing

    monkeypatch.setattr(pool, "disconnect", disconnect)
    monkeypatch.setattr(pool, "reset", lambda: resets.append("reset"))
    failure = await fails(budget, Script(budget, exceptions.OutOfMemoryError("command not allowed")))
    assert (failure.reason, failure.message) == ("error", "OutOfMemoryError: command not allowed")
    assert resets == ["reset"]


async def test_a_server_that_repeats_the_password_does_not_make_it_known() -> None:
    """As one may that does not know AUTH."""
    budget = SharedBudget("redis://someone:p%40ss-word@store", "r0")
    repeats = exceptions.ResponseError("unknown command 'AUTH', with args beginning with: 'p@ss-word'")
    failure = await fails(budget, Script(budget, repeats))
    assert failure.message == "ResponseError: unknown command 'AUTH', with args beginning with: '***'"


class Replica:
    def __init__(self, url: str, name: str, asks: Demand, rules: FleetRules = RULES) -> None:
        self.changes: list[Change] = []
        self.gateway = ScriptedGateway(asks)
        self.budget = SharedBudget(url, name, call_seconds_max=rules.call_seconds_max)
        self.failures: Counter[str] = Counter()
        self.membership = Membership(
            self.budget, self.gateway, rules, self.changes.append, on_call=self._called
        )

    def _called(self, result: str, seconds: float) -> None:
        if result != "ok":
            self.failures[result] += 1

    @property
    def rates(self) -> tuple[int, ...]:
        return self.gateway.rates


@asynccontextmanager
async def replicas(
    server: StoreServer, *asks: Demand, rules: FleetRules = RULES
) -> AsyncIterator[list[Replica]]:
    """They call when the test says so."""
    fleet = [Replica(server.url, f"r{i}", each, rules) for i, each in enumerate(asks)]
    try:
        yield fleet
    finally:
        for replica in fleet:
            await replica.budget.close()


async def slices(fleet: list[Replica], count: int) -> None:
    for _ in range(count):
        for replica in fleet:
            assert await replica.membership.renew()


async def answered(replica: Replica) -> None:
    """Where a call may take only so long that one in time is a matter of luck."""
    async with asyncio.timeout(20):
        while not await replica.membership.renew():
            pass


async def test_shares_add_up_on_the_servers_own_time(server: StoreServer) -> None:
    """Three replicas with uneven demand have all of C, and no more at any moment."""
    async with replicas(server, demand(1_600_000), demand(300_000), demand(100_000)) as fleet:
        for _ in range(6):
            for replica in fleet:
                await replica.membership.renew()
                assert sum(sum(r.rates) for r in fleet if r.gateway.share) <= sum(BUDGET)
        assert sum(sum(r.rates) for r in fleet) == pytest.approx(sum(BUDGET), abs=10)
        assert [r.membership.share.replicas for r in fleet] == [3, 3, 3]
        assert [r.membership.share.leads for r in fleet] == [True, False, False]


async def test_one_renewal_is_one_call_whatever_is_asked(server: StoreServer) -> None:
    """The number of calls does not depend on what the gateway carries; the script was loaded once."""
    async with replicas(server, demand(1)) as fleet:
        await slices(fleet, 1)
        with server.client() as client:
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            fleet[0].gateway.asks = demand(2_000_000, 2_000_000, 2_000_000)
            await slices(fleet, 10)
            stats = client.info("commandstats")
        assert stats["cmdstat_evalsha"]["calls"] == before + 10


async def test_every_key_expires(server: StoreServer) -> None:
    """Nothing of a fleet that has gone stays."""
    async with replicas(server, demand(900_000)) as fleet:
        await slices(fleet, 2)
        with server.client() as client:
            keys = client.keys("*")
            assert {key.rpartition(b":")[2].decode() for key in keys} <= set(KEYS)
            assert all(0 < client.pttl(key) <= 600_000 for key in keys)


async def test_a_dead_replica_is_forgotten_when_its_lease_ends(server: StoreServer) -> None:
    """By the server's clock; a short lease, so that nobody waits here."""
    short = FleetRules(lease_seconds=0.3, call_seconds_max=2.0)
    async with replicas(server, demand(900_000), demand(900_000), rules=short) as fleet:
        await slices(fleet, 3)
        dead, alive = fleet
        until = time.monotonic() + 20
        while not (sum(dead.rates) and sum(alive.rates)):
            await slices(fleet, 1)
            assert time.monotonic() < until
        while alive.membership.share.replicas > 1 or sum(alive.rates) < sum(BUDGET) - 10:
            await slices([alive], 1)
            assert time.monotonic() < until
        assert sum(dead.rates) > 0  # it did not say so itself


async def test_a_leaving_replica_gives_back_at_once(server: StoreServer) -> None:
    """Rates and lead."""
    async with replicas(server, demand(900_000), demand(900_000)) as fleet:
        await slices(fleet, 3)
        await fleet[0].membership.leave()
        await slices(fleet[1:], 1)
        assert sum(fleet[1].rates) == pytest.approx(sum(BUDGET), abs=10)
        assert fleet[1].membership.share.leads


async def test_a_flushed_script_cache_goes_unnoticed(server: StoreServer) -> None:
    """NOSCRIPT is answered by loading."""
    async with replicas(server, demand(900_000)) as fleet:
        await slices(fleet, 2)
        with server.client() as client:
            client.script_flush()
        await slices(fleet, 1)
        assert not fleet[0].failures


async def test_an_emptied_store_grants_nothing_twice(server: StoreServer) -> None:
    """FLUSHALL under two replicas: never more than C together, and soon all of it again."""
    async with replicas(server, demand(900_000), demand(900_000)) as fleet:
        await slices(fleet, 4)
        with server.client() as client:
            client.flushall()
        until = time.monotonic() + 20
        seen_all = False
        while not seen_all:
            for replica in fleet:
                await replica.membership.renew()
                assert sum(sum(r.rates) for r in fleet) <= sum(BUDGET)
            seen_all = sum(sum(r.rates) for r in fleet) >= sum(BUDGET) - 10 and all(
                r.membership.share.replicas == 2 for r in fleet
            )
            assert time.monotonic() < until


async def test_a_read_only_server_is_told_and_outlived(server: StoreServer) -> None:
    """As after a failover, until the address leads to the new primary."""
    async with replicas(server, demand(900_000)) as fleet:
        await slices(fleet, 2)
        before = fleet[0].rates
        with server.client() as client:
            client.replicaof("127.0.0.1", 1)
            try:
                assert not await fleet[0].membership.renew()
                assert fleet[0].failures == {"read_only": 1}
                assert fleet[0].rates == before
            finally:
                client.replicaof("no", "one")
        assert await fleet[0].membership.renew()


async def test_a_full_store_says_so(server: StoreServer) -> None:
    """The message tells it from other errors."""
    async with replicas(server, demand(900_000)) as fleet:
        await slices(fleet, 2)
        with server.client() as client:
            client.config_set("maxmemory", 1)
            try:
                with pytest.raises(StoreFailed, match="OutOfMemoryError") as failed:
                    await fleet[0].budget.renew(fleet[0].membership._standing.renewal(demand(1), 0.0))
                assert failed.value.reason == "error"
            finally:
                client.config_set("maxmemory", 0)
        assert await fleet[0].membership.renew()


async def test_a_wrong_password_is_told_without_the_password(server: StoreServer) -> None:
    """Denied; after it is corrected at the server the next call passes."""
    async with replicas(server, demand(900_000)) as fleet:
        await slices(fleet, 2)
        with server.client() as client:
            client.config_set("requirepass", "right")
            try:
                await fleet[0].budget.close()
                assert not await fleet[0].membership.renew()
                other = SharedBudget(f"redis://:wrong-one@127.0.0.1:{server.port}/0", "r9")
                renewal = fleet[0].membership._standing.renewal(demand(1), 0.0)
                with pytest.raises(StoreFailed) as failed:
                    await other.renew(renewal)
                assert failed.value.reason == "denied"
                assert "wrong-one" not in str(failed.value)
                await other.close()
                assert fleet[0].failures == {"denied": 1}
            finally:
                client.config_set("requirepass", "")
        assert await fleet[0].membership.renew()


async def test_a_stopped_server_comes_back_empty(server: StoreServer) -> None:
    """Shares are held, then local, then shared again; one line for each change of state."""
    rules = FleetRules(
        slice_seconds=0.01,
        lease_seconds=2.0,
        retry_seconds=0.02,
        holding_after_seconds=0.1,
        call_seconds_max=1.0,
    )
    async with replicas(server, demand(900_000), demand(100_000), rules=rules) as fleet:
        await slices(fleet, 5)
        tasks = [asyncio.create_task(replica.membership.run()) for replica in fleet]
        try:
            server.stop()
            until = time.monotonic() + 30
            while not all(
                r.membership.state is State.ALONE and sum(r.rates) == sum(BUDGET) // 2 for r in fleet
            ):
                assert not any(task.done() for task in tasks), [t for t in tasks if t.done()]
                assert sum(sum(r.rates) for r in fleet) <= sum(BUDGET)
                assert time.monotonic() < until, [(r.membership.share, r.failures) for r in fleet]
                await asyncio.sleep(0.01)
            server.start()
            while not (fleet[0].rates[0] > 500_000 and fleet[1].membership.share.replicas == 2):
                assert not any(task.done() for task in tasks), [t for t in tasks if t.done()]
                assert sum(sum(r.rates) for r in fleet) <= sum(BUDGET)
                assert time.monotonic() < until, [(r.membership.share, r.failures) for r in fleet]
                await asyncio.sleep(0.01)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for replica in fleet:
            told = [change.after for change in replica.changes if change.after is not change.before]
            assert told == [State.SHARED, State.HOLDING, State.ALONE, State.SHARED]
            assert replica.changes[1].reason in ("unreachable", "timed_out")


async def test_a_hanging_server_holds_a_call_no_longer_than_its_limit(server: StoreServer) -> None:
    """It times out, others on the loop go on, and after the thaw the next call passes."""
    rules = FleetRules(call_seconds_max=0.2)
    async with replicas(server, demand(900_000), rules=rules) as fleet:
        await answered(fleet[0])
        fleet[0].failures.clear()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert not await fleet[0].membership.renew()
            assert fleet[0].failures == {"timed_out": 1}
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await answered(fleet[0])


async def test_the_keys_of_a_fleet_are_in_one_slot_of_a_cluster(tmp_path: Path) -> None:
    """A server in cluster mode refuses scripts over several slots, and keys that were not named."""
    nodes = str(tmp_path / "nodes.conf")
    with store_server("redis", "--cluster-enabled", "yes", "--cluster-config-file", nodes) as server:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until = time.monotonic() + 20
            while client.execute_command("CLUSTER", "INFO").find(b"cluster_state:ok") < 0:
                assert time.monotonic() < until
        async with replicas(server, demand(900_000), demand(1)) as fleet:
            await slices(fleet, 3)
            await fleet[0].membership.leave()


async def test_calls_go_to_the_node_of_a_cluster_that_has_the_slot(tmp_path: Path) -> None:
    """Replicas that were given the address of another node share through the right one."""
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                store_server(
                    "redis",
                    "--cluster-enabled",
                    "yes",
                    "--cluster-config-file",
                    str(tmp_path / f"{name}.conf"),
                )
            )
            for name in ("asked", "owner")
        ]
        asked, owner = (stack.enter_context(node.client()) for node in nodes)
        owner.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        asked.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[1].port)
        until = time.monotonic() + 30
        while not all(
            client.execute_command("CLUSTER", "INFO").count(b"state:ok") for client in (asked, owner)
        ):
            assert time.monotonic() < until
        async with replicas(nodes[0], demand(900_000), demand(1)) as fleet:
            await slices(fleet, 3)
            assert fleet[0].membership.share.replicas == 2
            assert not any(replica.failures for replica in fleet)


async def test_the_leader_hears_the_signals_of_all(server: StoreServer) -> None:
    """And nobody else does."""
    asks = [Demand(pools=demand(9).pools, signals=f"ü{i}") for i in range(3)]
    async with replicas(server, *asks) as fleet:
        await slices(fleet, 1)
        fleet[0].membership._standing._signals_at = float("-inf")
        await slices(fleet, 1)
        assert set(fleet[0].gateway.signals) >= {"ü0", "ü1", "ü2"}
        assert not fleet[1].gateway.signals
