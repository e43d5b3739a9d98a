"""CPU time of a process with all that it has started, and of the machine, from `/proc`."""

import os
from collections.abc import Iterator
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def process_tree(pid: int) -> Iterator[int]:
    """The process, and those that it or its threads or their children have started and that still run."""
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return
    for thread in threads:
        try:
            started = (thread / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # a thread that has just ended
        for child in started:
            yield from process_tree(int(child))


def tree_cpu_seconds(pid: int) -> float:
    """User and system time of the tree, all threads, and of its processes that ended and were waited for.

    The kernel tells it in ticks, of 10 ms on most machines. Raises ProcessLookupError if `pid` is no more.
    """
    ticks = [_process_ticks(each) for each in process_tree(pid)]
    if ticks[0] is None:
        raise ProcessLookupError(pid)
    return sum(each for each in ticks if each is not None) / TICKS_PER_SECOND


def _process_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in brackets may hold anything, blanks and brackets included; the fields count from behind it.
    fields = stat.rpartition(")")[2].split()
    utime, stime, cutime, cstime = map(int, fields[11:15])
    return utime + stime + cutime + cstime


def machine_cpu_seconds() -> float:
    """All that the machine's cores have been busy with, and what other machines on its host took from it."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_SECOND
