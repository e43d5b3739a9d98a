"""Where the figures were taken."""

import os
import platform
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.proxy_cost.contenders import ROOT


@dataclass(frozen=True)
class Machine:
    cores: int
    cpu: str
    memory_gib: float
    kernel: str
    python: str
    commit: str
    """Of the gateway; with a + if files differ from it."""

    @classmethod
    def this_one(cls) -> "Machine":
        return cls(
            cores=len(os.sched_getaffinity(0)),
            cpu=_value("/proc/cpuinfo", "model name") or platform.machine(),
            memory_gib=round(int((_value("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
            kernel=f"{platform.system()} {platform.release()}",
            python=_python(),
            commit=_commit(),
        )

    def __str__(self) -> str:
        return (
            f"{self.cores} cores of {self.cpu}, {self.memory_gib:g} GiB, {self.kernel}, {self.python}; "
            f"gateway at {self.commit}"
        )


def load_average() -> float:
    """Of the last minute: processes that ran or wanted to."""
    return round(os.getloadavg()[0], 2)


def _value(file: str, key: str) -> str | None:
    for line in Path(file).read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _python() -> str:
    """Which, and how it was built: without optimisations it is slower, on any code."""
    options = sysconfig.get_config_var("CONFIG_ARGS") or ""
    if sys.base_prefix == "/usr":
        build = f"as in {_distribution()}"
    else:
        build = "optimised build" if "--enable-optimizations" in options else "build without optimisations"
    return f"{platform.python_implementation()} {platform.python_version()} ({build})"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "an unnamed distribution"


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "gateway")
    return (git("rev-parse", "--short", "HEAD") or "no commit") + ("+" if changed else "")
