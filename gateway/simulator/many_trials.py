"""Many trials, side by side in processes where there is more than one core: with the same results."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from multiprocessing.queues import SimpleQueue

from gateway.simulator.trial import Job, Trial, run_job

POLL_SECONDS = 0.2

Told = Callable[[int, float], None]
"""The number of a job, and which part of it is done."""

_parts: "SimpleQueue[tuple[int, float]] | None" = None  # of a worker process


def cores() -> int:
    """How many of the machine's processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(jobs: Sequence[Job], processes: int, told: Told) -> list[Trial]:
    """In the order of the jobs."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        return [run_job(job, partial(told, number)) for number, job in enumerate(jobs)]
    # Fresh processes: a fork would take along the thread that draws the progress bar.
    context = multiprocessing.get_context("spawn")
    parts = context.SimpleQueue()
    pool = ProcessPoolExecutor(processes, context, _begin_worker, (parts,))
    try:
        with _interrupts_held():
            futures = [pool.submit(_work, number, job) for number, job in enumerate(jobs)]
        undone = set(futures)
        while undone:
            done, undone = wait(undone, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()  # raises what the job has raised
            while not parts.empty():
                told(*parts.get())
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that are started meanwhile never get one: Ctrl-C reaches all, but the parent ends the others.
    What comes meanwhile is delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_worker(parts: "SimpleQueue[tuple[int, float]]") -> None:
    global _parts
    _parts = parts


def _work(number: int, job: Job) -> Trial:
    assert _parts is not None
    queue = _parts
    return run_job(job, lambda part: queue.put((number, part)))
