"""A rolling restart of three replicas under load: one after the other ends in good order and starts anew."""

from contextlib import AsyncExitStack

from tests.benchmarks.fleet.load import arrivals
from tests.benchmarks.fleet.shares import REPLICAS
from tests.benchmarks.fleet.stage import CAPACITY, ENGINE_SECONDS, Stage, settings
from tests.benchmarks.fleet.verdicts import Verdict, at_least, at_most, say
from tests.support.fleet_processes import counting_engine, in_state
from tests.support.gateway_process import GatewayProcess, running_gateway
from tests.support.store_servers import StoreServer

FIRST_AT_SECONDS = 12.0
EVERY_SECONDS = 6.0
EVEN = (1 / 3, 1 / 3, 1 / 3)


async def measure(server: StoreServer) -> list[Verdict]:
    seconds = FIRST_AT_SECONDS + EVERY_SECONDS * REPLICAS + 6
    say(f"rolling restart: {seconds:g} s")
    coming = arrivals(CAPACITY, seconds, 31, weights=EVEN)
    async with counting_engine(ENGINE_SECONDS) as engine, AsyncExitStack() as stack:
        own = settings(engine.url, server.url)

        async def start() -> GatewayProcess:
            return await stack.enter_async_context(running_gateway(own))

        stage = Stage([await start() for _ in range(REPLICAS)], engine, CAPACITY)
        await in_state("shared", stage.gateways)

        async def roll(stage: Stage) -> None:
            for index in range(REPLICAS):
                await stage.until(FIRST_AT_SECONDS + EVERY_SECONDS * index)
                say(f"  replica {index + 1} is told to end")
                await stage.gateways[index].stop()  # clients find out for themselves
                stage.replace(index, await start())
            await in_state("shared", stage.gateways)

        run = await stage.run(coming, seconds, roll)
    sent_on = run.turned_away
    told = ", ".join(f"{why} {count}" for why, count in sent_on.most_common()) or "nobody"
    rolling = run.admitted_between(FIRST_AT_SECONDS, FIRST_AT_SECONDS + EVERY_SECONDS * REPLICAS)
    return [
        at_most("requests that failed at all replicas", 0, run.failed, "{:.0f}", f"of {len(run.asked)}"),
        at_most("requests begun at the engine whose answer was lost", 0, run.lost, "{:.0f}"),
        Verdict("sent on to another replica", "", told),
        at_most("admitted in the fullest 10 s, parts of C", 1.05, run.fullest(), "{:.3f}"),
        at_least("C used while replicas come and go", 0.9, rolling, "{:.3f}"),
    ]
