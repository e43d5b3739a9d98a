"""What operators did: one log line each, and the last of them kept for `/admin/changes`."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from pydantic import SecretStr

from gateway.policy.clock import Clock
from gateway.telemetry.labels import clean

ACTIONS_KEPT = 100
VALUES_SHOWN = 50
"""Of one action: a reload may change more settings than anybody reads."""

_log = structlog.get_logger("gateway")


@dataclass(frozen=True, slots=True)
class Operator:
    """Where an action came from, and the name that came with it, which nobody has checked."""

    address: str
    name: str | None = None


SIGNAL = Operator("signal")


@dataclass(frozen=True, slots=True)
class Action:
    """`kind` is settings, reload or drain; `reason` says why it was refused. `values` are settings by name:
    what they were, what they are."""

    at: int
    kind: str
    by: Operator
    reason: str | None = None
    values: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.reason is None


class AuditTrail:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._actions: deque[Action] = deque(maxlen=ACTIONS_KEPT)

    def record(
        self,
        kind: str,
        by: Operator,
        values: Mapping[str, tuple[Any, Any]] | None = None,
        *,
        reason: str | None = None,
    ) -> None:
        shown = {
            name: (_plain(old), _plain(new))
            for name, (old, new) in list((values or {}).items())[:VALUES_SHOWN]
        }
        name = None if by.name is None else clean(by.name)
        by = Operator(by.address, name)
        self._actions.append(Action(self._clock.now(), kind, by, reason, shown))
        write = _log.info if reason is None else _log.warning
        said: dict[str, Any] = {"action": kind, "by": by.address, "operator": name, "done": reason is None}
        if shown:
            said["values"] = {name: {"old": old, "new": new} for name, (old, new) in shown.items()}
        if reason is not None:
            said["reason"] = reason
        write("operator action", **said)

    def __iter__(self) -> Iterator[Action]:
        """Oldest first."""
        return iter(self._actions)


def _plain(value: Any) -> Any:
    """As JSON has it; of a secret only that there is one."""
    if isinstance(value, SecretStr):
        return "a value that is not shown"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
