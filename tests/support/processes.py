"""Other processes, by their ids."""

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """Those that the process has started and that still run."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """A process that has ended and was not yet waited for runs no more."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def open_sockets(pid: int) -> int:
    """Sockets that the process has open, the listening ones included."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += os.readlink(descriptor).startswith("socket:")
        except FileNotFoundError:
            pass  # closed meanwhile
    return count
