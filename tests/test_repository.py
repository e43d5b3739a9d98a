"""What the repository ships beside its code: lock files and container files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = ("requirements.lock", "requirements-image.lock", "requirements-dev.lock")

_PINNED = re.compile(r"([a-z0-9.-]+)==(\S+)( ; .+)? \\")
_HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")


def _pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return {match[1]: match[2] for match in map(_PINNED.fullmatch, lines) if match}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_is_pins_and_hashes(name: str) -> None:
    """No index, no address, no path: pip takes the packages from wherever its user has them from."""
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        assert line in ("", "#") or line.startswith("# ") or _PINNED.fullmatch(line) or _HASH.fullmatch(line)
        assert "://" not in line


def test_developers_have_what_users_have() -> None:
    """Each lock is the one before it and more, so that what is tested is what runs, in an image too."""
    plain, image, dev = map(_pins, LOCKS)
    assert plain.items() < image.items() < dev.items()


def test_the_locks_cover_what_the_project_asks_for() -> None:
    """A dependency that is added without renewing the locks would be missing in an image."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {"requirements.lock": project["dependencies"]}
    extras = project["optional-dependencies"]
    wanted["requirements-image.lock"] = [*project["dependencies"], *extras["redis"], *extras["otel"]]
    wanted["requirements-dev.lock"] = [*project["dependencies"], *extras["dev"]]
    for lock, requirements in wanted.items():
        names = {re.split(r"[\[<>=;! ]", each)[0].lower().replace("_", "-") for each in requirements}
        assert names <= _pins(lock).keys()
