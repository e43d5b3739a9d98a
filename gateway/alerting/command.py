"""`qos-gateway rules`: the rules for a configuration, printed, written or compared."""

import re
from pathlib import Path

from gateway.alerting.fleet import fleet_groups
from gateway.alerting.health import health_groups
from gateway.alerting.model import Group
from gateway.alerting.promises import promise_groups
from gateway.alerting.rendering import rendered
from gateway.settings import Settings

FILE_NAME = "qos-gateway.yml"
_JOB = re.compile(r"[\w.:/@-]+")


def rule_groups(settings: Settings, job: str) -> tuple[Group, ...]:
    """Recorded ratios come before the alerts that use them."""
    return (*promise_groups(settings, job), *health_groups(settings, job), *fleet_groups(job))


def rules_text(settings: Settings, job: str, runbook: str) -> str:
    """Raises ValueError for a name that no job should have: it stands inside every expression."""
    if not _JOB.fullmatch(job):
        raise ValueError(f"--job: found {job!r}, expected letters, digits and any of . : / @ _ -")
    return rendered(rule_groups(settings, job), runbook)


def is_current(folder: Path, text: str) -> bool:
    """Whether the folder has just these rules."""
    path = folder / FILE_NAME
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write(folder: Path, text: str) -> Path:
    """Answers the file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    path.write_text(text, encoding="utf-8")
    return path
