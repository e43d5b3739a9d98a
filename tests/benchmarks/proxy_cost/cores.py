"""Which core does what: the engine and the load on one, the proxy under test on another."""

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cores:
    """None: there are fewer than two, and nothing is pinned."""

    load: int | None
    proxy: int | None

    @classmethod
    def of_this_machine(cls) -> "Cores":
        allowed = sorted(os.sched_getaffinity(0))
        return cls(allowed[0], allowed[-1]) if len(allowed) > 1 else cls(None, None)

    def pin_this_process(self) -> None:
        """And with it all that it starts: the engine and wrk."""
        if self.load is not None:
            os.sched_setaffinity(0, {self.load})

    def on_proxy_core(self, command: Sequence[str]) -> list[str]:
        if self.proxy is None:
            return list(command)
        return ["taskset", "--cpu-list", str(self.proxy), *command]

    def __str__(self) -> str:
        if self.proxy is None:
            return "fewer than two: nothing is pinned, proxy, engine and load share what there is"
        return f"engine and load on core {self.load}, proxy on core {self.proxy}"
