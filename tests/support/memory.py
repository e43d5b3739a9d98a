"""How much memory a process has."""

from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Linux only, as these tests are."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)


def open_sockets(pid: int) -> int:
    """Sockets that the process has open, the listening ones included."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += descriptor.readlink().name.startswith("socket:")
        except FileNotFoundError:
            pass  # closed meanwhile
    return count
