"""What was checked, what failed, and what could not be tried here."""

from dataclasses import dataclass, field
from typing import Final

NEVER_TRIED: Final = (
    "docker itself, and its network between containers",
    "memory and CPU limits (cgroups), seccomp profiles",
    "the images of Prometheus, Grafana, Valkey and vLLM",
)
"""Whatever tools there are: this check starts processes in the image's files, not containers."""


@dataclass
class Report:
    failed: int = 0
    skipped: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str, found: object = "") -> bool:
        self.failed += not holds
        print(f"{'ok    ' if holds else 'FAILED'}  {what}{f': {found}' if found != '' else ''}", flush=True)
        return holds

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(what)
        print(f"skipped {what}: {why}", flush=True)

    def end(self) -> int:
        """The exit status."""
        for what in NEVER_TRIED:
            print(f"never tried here: {what}")
        summary = f"{self.failed} failed" if self.failed else "all good"
        print(f"{summary}{f', {len(self.skipped)} skipped' if self.skipped else ''}")
        return 1 if self.failed else 0
