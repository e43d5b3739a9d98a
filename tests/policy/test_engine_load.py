"""An engine's own load, and whom it keeps out."""

from typing import Any

import pytest

from gateway.policy.clock import NEVER
from gateway.policy.engine_load import EngineLoad, LoadGate
from tests.support.policy_settings import P0, P1, P2, nanoseconds, upstream

STALE = nanoseconds(5)


def gate(
    load: EngineLoad | None = None, own_prefills: int = 0, own_tokens: int = 0, **given: Any
) -> LoadGate:
    """Told this load at time 0."""
    made = LoadGate(upstream(**{"waiting_high": 4.0, "kv_high": 0.9, "load_stale_ns": STALE, **given}))
    if load is not None:
        made.told(load, own_prefills, own_tokens, 0)
    return made


def closed(gate: LoadGate, own_prefills: int = 0, own_tokens: int = 0, now: int = 1) -> str:
    """The classes kept out, as one word."""
    return "".join(p.name for p in (P0, P1, P2) if gate.closes(p, own_prefills, own_tokens, now))


@pytest.mark.parametrize(
    ("waiting", "kept_out"),
    [(0, ""), (4, ""), (5, "P2"), (8, "P2"), (9, "P1P2"), (10_000, "P1P2")],
)
def test_more_and_more_requests_wait_in_the_engine(waiting: int, kept_out: str) -> None:
    """Past the threshold P2 is kept out, past twice that P1 as well, P0 never."""
    assert closed(gate(EngineLoad(waiting=waiting))) == kept_out


@pytest.mark.parametrize(
    ("usage", "kept_out"),
    [(0.0, ""), (0.9, ""), (0.91, "P2"), (0.95, "P2"), (0.96, "P1P2"), (1.0, "P1P2")],
)
def test_the_engines_memory_fills(usage: float, kept_out: str) -> None:
    """Past the threshold P2 is kept out, half of the way from there to full P1 as well, P0 never."""
    assert closed(gate(EngineLoad(kv_usage=usage))) == kept_out


def test_either_signal_is_enough() -> None:
    assert closed(gate(EngineLoad(waiting=9, kv_usage=0.0))) == "P1P2"
    assert closed(gate(EngineLoad(waiting=0, kv_usage=1.0))) == "P1P2"
    assert closed(gate(EngineLoad(waiting=5, kv_usage=0.97))) == "P1P2"


def test_a_threshold_of_zero() -> None:
    """One that waits is then too many, for P1 as for P2."""
    assert closed(gate(EngineLoad(waiting=0), waiting_high=0.0)) == ""
    assert closed(gate(EngineLoad(waiting=1), waiting_high=0.0)) == "P1P2"


def test_own_prompts_sent_since_the_page_count_as_waiting() -> None:
    """Five prompts sent after a page that said nobody waits are five that wait, as far as anyone knows."""
    told = gate(EngineLoad(waiting=0), own_prefills=3)
    assert [closed(told, own_prefills=n) for n in (3, 7, 8, 11, 12)] == ["", "", "P2", "P2", "P1P2"]
    assert told.waiting(8, 1) == 5


def test_own_first_tokens_since_the_page_open_the_gate_again() -> None:
    """Each own prompt that got its first token since is one less that waits."""
    told = gate(EngineLoad(waiting=9), own_prefills=9)
    assert [closed(told, own_prefills=n) for n in (9, 8, 5, 4, 0)] == ["P1P2", "P2", "P2", "", ""]


def test_fewer_than_none_do_not_wait() -> None:
    """Own prompts that were running rather than waiting do not make the next ones free."""
    told = gate(EngineLoad(waiting=1), own_prefills=6)
    assert told.waiting(0, 1) == 0


def test_own_tokens_since_the_page_count_as_memory_used() -> None:
    """What was sent since fills the engine's memory, what has ended since has left it."""
    told = gate(EngineLoad(kv_usage=0.5, kv_tokens=1000), own_tokens=500)
    assert told.kv_usage(500, 1) == 0.5
    assert [closed(told, own_tokens=n) for n in (500, 900, 901, 951)] == ["", "", "P2", "P1P2"]
    full = gate(EngineLoad(kv_usage=0.96, kv_tokens=1000), own_tokens=900)
    assert [closed(full, own_tokens=n) for n in (900, 880, 800)] == ["P1P2", "P2", ""]
    assert full.kv_usage(-100, 1) == 0.0


def test_memory_of_unknown_size_is_not_corrected() -> None:
    """Without the size own tokens say nothing about the fraction: the page's own word stands."""
    told = gate(EngineLoad(kv_usage=0.91), own_tokens=100)
    assert told.kv_usage(10**9, 1) == 0.91
    assert [closed(told, own_tokens=n) for n in (0, 100, 10**9)] == ["P2"] * 3


def test_a_signal_that_is_missing_keeps_nobody_out() -> None:
    for load in (EngineLoad(), EngineLoad(running=10**6), EngineLoad(kv_tokens=1)):
        told = gate(load)
        assert closed(told, own_prefills=1000, own_tokens=1000) == ""
        assert (told.waiting(1000, 1), told.kv_usage(1000, 1)) == (None, None)


def test_before_the_first_page() -> None:
    """Nothing is known, so nobody is kept out, and there is no time at which that changes."""
    untold = gate()
    assert closed(untold, own_prefills=1000) == ""
    assert untold.waiting(0, 0) is None
    assert untold.stale_at == NEVER


def test_a_page_counts_until_it_is_stale() -> None:
    """To the last nanosecond, and then not at all."""
    told = gate(EngineLoad(waiting=100, kv_usage=1.0))
    assert told.stale_at == STALE
    assert closed(told, now=STALE - 1) == "P1P2"
    assert closed(told, now=STALE) == ""
    assert (told.waiting(0, STALE - 1), told.kv_usage(0, STALE - 1)) == (100, 1.0)
    assert (told.waiting(0, STALE), told.kv_usage(0, STALE)) == (None, None)


def test_the_next_page_begins_anew() -> None:
    """It replaces what was known, own counts and the time it holds included."""
    told = gate(EngineLoad(waiting=100, kv_usage=1.0))
    told.told(EngineLoad(waiting=5), own_prefills=2, own_tokens=0, now=STALE - 1)
    assert closed(told, own_prefills=2, now=STALE + 1) == "P2"
    assert told.kv_usage(0, STALE) is None
    assert told.stale_at == 2 * STALE - 1


def test_new_thresholds_hold_at_once() -> None:
    """A reload judges the last page by its own thresholds."""
    told = gate(EngineLoad(waiting=5))
    told.reconfigure(upstream(waiting_high=10.0))
    assert closed(told) == ""
