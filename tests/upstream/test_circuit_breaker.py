"""What an upstream may get: after failed requests, after failed probes, on trial. Times are plain numbers."""

import random

import pytest

from gateway.policy.clock import NEVER
from gateway.upstream.circuit_breaker import Admittance, BreakerRules, CircuitBreaker

ALL, TRIAL, NONE = Admittance.ALL, Admittance.TRIAL, Admittance.NONE
RULES = BreakerRules(failures=3, open_ns=100)


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker(RULES)


@pytest.fixture
def tripped() -> CircuitBreaker:
    """Since 10, until 110."""
    breaker = CircuitBreaker(RULES)
    for _ in range(3):
        breaker.failed(5, now=10)
    return breaker


@pytest.fixture
def on_trial(tripped: CircuitBreaker) -> CircuitBreaker:
    """Since 110."""
    assert tripped.advance(110)
    return tripped


def test_failures_in_a_row(breaker: CircuitBreaker) -> None:
    """The last one that is needed shuts it, and says so."""
    assert [breaker.failed(0, now=n) for n in range(3)] == [False, False, True]
    assert breaker.admits is NONE


def test_a_success_in_between(breaker: CircuitBreaker) -> None:
    """Counting begins anew, also if what succeeded had been sent before those that failed."""
    for _ in range(10):
        breaker.failed(20, now=30)
        breaker.failed(20, now=30)
        assert not breaker.succeeded(5)
    assert breaker.admits is ALL


def test_time_alone_makes_no_failures_good(breaker: CircuitBreaker) -> None:
    """Three failures an age apart are three in a row."""
    for n in range(3):
        breaker.failed(0, now=n * 10**15)
    assert breaker.admits is NONE


def test_when_the_time_is_over_there_is_a_trial(tripped: CircuitBreaker) -> None:
    """Not a moment before; called early nothing changes."""
    assert tripped.next_deadline() == 110
    assert not tripped.advance(109)
    assert tripped.admits is NONE
    assert tripped.advance(110)
    assert tripped.admits is TRIAL
    assert not tripped.advance(111)
    assert tripped.next_deadline() == NEVER


def test_a_trial_that_succeeds(on_trial: CircuitBreaker) -> None:
    """All may come, and it takes as many failures as ever to shut it."""
    assert on_trial.succeeded(115)
    assert on_trial.admits is ALL
    assert [on_trial.failed(120, now=130) for _ in range(3)] == [False, False, True]


def test_a_trial_that_fails(on_trial: CircuitBreaker) -> None:
    """One failure is enough, and the time begins anew."""
    assert on_trial.failed(115, now=150)
    assert on_trial.admits is NONE
    assert on_trial.next_deadline() == 250


def test_old_news(tripped: CircuitBreaker) -> None:
    """What was sent before the trial began is nothing, be it that it ends before, in or after the trial."""
    assert not tripped.succeeded(5)
    assert not tripped.failed(5, now=60)
    assert tripped.next_deadline() == 110
    tripped.advance(110)
    assert not tripped.succeeded(109)
    assert not tripped.failed(109, now=120)
    assert tripped.admits is TRIAL
    tripped.succeeded(110)
    for _ in range(10):
        assert not tripped.failed(5, now=130)
    assert tripped.admits is ALL


def test_the_first_token_of_a_trial(on_trial: CircuitBreaker) -> None:
    """Others need not wait for the end of a long stream, but a failure before a success shuts it again."""
    assert on_trial.began(115)
    assert on_trial.admits is ALL
    assert on_trial.failed(115, now=200)
    assert on_trial.next_deadline() == 300


def test_the_whole_answer_after_the_first_token(on_trial: CircuitBreaker) -> None:
    """Then all is as before it was shut."""
    on_trial.began(115)
    assert not on_trial.succeeded(115)
    assert [on_trial.failed(120, now=130) for _ in range(3)] == [False, False, True]


def test_first_tokens_elsewhere_are_no_success(breaker: CircuitBreaker) -> None:
    """Streams that begin and break off are failures in a row."""
    for _ in range(3):
        assert not breaker.began(5)
        breaker.failed(5, now=10)
    assert breaker.admits is NONE
    assert not breaker.began(5)


def test_failed_probes(breaker: CircuitBreaker) -> None:
    """It gets nothing, however long; once they pass, at once a trial."""
    assert breaker.probed(False, now=10)
    assert breaker.admits is NONE
    assert breaker.next_deadline() == NEVER
    assert not breaker.advance(10**15)
    assert breaker.probed(True, now=50)
    assert breaker.admits is TRIAL
    assert breaker.succeeded(50)
    assert breaker.admits is ALL


def test_probes_do_not_shorten_the_time(tripped: CircuitBreaker) -> None:
    """One that serves nobody is not let in because it is alive."""
    assert not tripped.probed(False, now=20)
    assert not tripped.probed(True, now=40)
    assert tripped.admits is NONE
    assert tripped.next_deadline() == 110


def test_probes_that_fail_longer_than_the_time(tripped: CircuitBreaker) -> None:
    """Then it is the probes that are waited for."""
    tripped.probed(False, now=20)
    assert not tripped.advance(500)
    assert tripped.probed(True, now=600)
    assert tripped.admits is TRIAL


def test_probes_that_fail_during_the_trial(on_trial: CircuitBreaker) -> None:
    """It is over, and its end tells nothing of the next one."""
    assert on_trial.probed(False, now=120)
    assert not on_trial.succeeded(115)
    assert on_trial.probed(True, now=130)
    assert not on_trial.succeeded(115)
    assert on_trial.admits is TRIAL


def test_one_more_at_each_passed_probe(on_trial: CircuitBreaker) -> None:
    """As many beside the trial as it takes failures to shut it, and then one in each such time."""
    assert [on_trial.add(at) for at in (120, 130, 140, 150, 239)] == [True, True, True, False, False]
    assert [on_trial.add(at) for at in (240, 250, 339, 345)] == [True, False, False, True]
    assert on_trial.admits is TRIAL


def test_more_only_on_trial(breaker: CircuitBreaker, tripped: CircuitBreaker) -> None:
    """Where all may come, or none, a passed probe lets nobody in."""
    assert not breaker.add(50)
    assert not tripped.add(50)
    assert (breaker.admits, tripped.admits) == (ALL, NONE)


def test_any_of_several_ends_the_trial(on_trial: CircuitBreaker) -> None:
    """The first that succeeds opens it; the first that fails shuts it, and the others are old news then."""
    on_trial.add(120)
    assert on_trial.failed(115, now=130)
    assert not on_trial.succeeded(121)
    on_trial.advance(230)
    on_trial.add(240)
    assert not on_trial.succeeded(121)
    assert on_trial.succeeded(241)
    assert not on_trial.failed(231, now=250)
    assert on_trial.admits is ALL


def test_each_trial_counts_for_itself(on_trial: CircuitBreaker) -> None:
    """What was let in beside the last one takes nothing from the next."""
    for at in (120, 130, 140):
        on_trial.add(at)
    on_trial.failed(115, now=150)
    on_trial.advance(250)
    assert [on_trial.add(at) for at in (251, 252, 253, 254)] == [True, True, True, False]


def test_one_failure_may_be_enough() -> None:
    """`failures: 1`."""
    breaker = CircuitBreaker(BreakerRules(failures=1, open_ns=100))
    assert breaker.failed(0, now=0)
    breaker.advance(100)
    breaker.began(100)
    assert breaker.admits is ALL
    assert breaker.failed(100, now=101)


def test_any_life() -> None:
    """Whatever comes in whatever order: each change is told, nothing leads from NONE to ALL but a trial, and
    where probes pass and time goes on it does not stay at NONE. One more beside a trial changes nothing."""
    seed = random.Random(7)
    seen = set()
    for _ in range(200):
        breaker, now = CircuitBreaker(RULES), 0
        for _ in range(60):
            before, now = breaker.admits, now + seed.randrange(60)
            sent = seed.randrange(max(now - 100, 0), now + 1)
            changed = seed.choice(
                (
                    lambda b=breaker, s=sent: b.succeeded(s),
                    lambda b=breaker, s=sent: b.began(s),
                    lambda b=breaker, s=sent, n=now: b.failed(s, n),
                    lambda b=breaker, n=now: b.probed(False, n),
                    lambda b=breaker, n=now: b.probed(True, n),
                    lambda b=breaker, n=now: b.advance(n),
                )
            )()
            assert changed == (breaker.admits is not before)
            after = breaker.admits
            assert after is TRIAL or not breaker.add(now)
            assert breaker.admits is after
            if changed:
                seen.add((before, breaker.admits))
        breaker.probed(True, now)
        breaker.advance(now + 100)
        assert breaker.admits in (ALL, TRIAL)
    assert seen == {(ALL, NONE), (NONE, TRIAL), (TRIAL, NONE), (TRIAL, ALL)}
