"""Retries are a fraction of the requests, with a few saved up for the moment when an engine goes."""

import random

import pytest

from gateway.upstream.retry_budget import RESERVE, RetryBudget


def taken(budget: RetryBudget) -> int:
    """How many retries it pays for now."""
    count = 0
    while budget.take():
        count += 1
    return count


def test_the_first_failure_can_be_retried() -> None:
    """There is something before any request was counted, and no more than the reserve."""
    assert taken(RetryBudget(0.1)) == RESERVE


@pytest.mark.parametrize(("fraction", "requests"), [(0.1, 10), (0.5, 2), (1.0, 1), (0.001, 1000)])
def test_requests_pay_for_retries(fraction: float, requests: int) -> None:
    """Exactly one for so many, and not one request earlier."""
    budget = RetryBudget(fraction)
    taken(budget)
    for _ in range(3):
        for _ in range(requests - 1):
            budget.request()
            assert not budget.take()
        budget.request()
        assert budget.take()
        assert not budget.take()


def test_no_more_is_saved_than_the_reserve() -> None:
    """However many requests there were."""
    budget = RetryBudget(0.1)
    for _ in range(100_000):
        budget.request()
    assert taken(budget) == RESERVE


def test_zero_is_none() -> None:
    """Not even the first one."""
    budget = RetryBudget(0.0)
    for _ in range(1000):
        budget.request()
    assert not budget.take()


def test_while_everything_fails() -> None:
    """When every request asks for a retry, those beyond the fraction go without."""
    budget = RetryBudget(0.1)
    retries = 0
    for _ in range(1000):
        budget.request()
        retries += budget.take()
    assert 100 <= retries <= 100 + RESERVE


def test_between_any_two_moments() -> None:
    """retries ≤ fraction × requests + reserve, in every part of a random life."""
    chance = random.Random(3)
    budget = RetryBudget(0.1)
    ahead = most = 0.0  # retries over what requests have paid for, and how far that rose above its lowest
    lowest = 0.0
    for _ in range(20_000):
        if chance.random() < chance.choice((0.02, 0.5)):
            ahead += budget.take()
        else:
            budget.request()
            ahead -= 0.1
        lowest = min(lowest, ahead)
        most = max(most, ahead - lowest)
    assert RESERVE - 1 <= most <= RESERVE + 1e-6
