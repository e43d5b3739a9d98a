"""Write the reference pages, or with `--check` say whether they are as generated.

python -m config.reference
python -m config.reference --check
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from config.reference.metrics_page import metrics_page
from config.reference.settings_page import settings_page

ROOT = Path(__file__).parents[2]


def pages() -> dict[str, str]:
    """Path inside the repository → content."""
    return {
        "config/REFERENCE.md": settings_page(ROOT),
        "config/prometheus/METRICS.md": metrics_page(),
    }


def differences(root: Path) -> list[str]:
    """The pages under `root` that are missing or not as generated, a line each."""
    return [
        f"{name}: not as `python -m config.reference` writes it"
        for name, content in pages().items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != content
    ]


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--check"]:
        wrong = differences(ROOT)
        print("\n".join(wrong) or "the reference pages are as generated")
        return 1 if wrong else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name, content in pages().items():
        (ROOT / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
