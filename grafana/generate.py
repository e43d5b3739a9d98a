"""Write the dashboards to `grafana/dashboards/`, or with `--check` say whether they are as generated.

python -m grafana.generate
python -m grafana.generate --check
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from grafana.boards import admission, controller, engines, fleet, gateway, slo_overview
from grafana.model import Dashboard

FOLDER = Path(__file__).parent / "dashboards"

DASHBOARDS: tuple[Dashboard, ...] = (
    slo_overview.DASHBOARD,
    admission.DASHBOARD,
    controller.DASHBOARD,
    engines.DASHBOARD,
    fleet.DASHBOARD,
    gateway.DASHBOARD,
)


def files() -> dict[str, str]:
    """File name → content."""
    return {f"{d.name}.json": json.dumps(d.json(), indent=2, ensure_ascii=False) + "\n" for d in DASHBOARDS}


def differences(folder: Path) -> list[str]:
    """What is wrong in the folder, a line each."""
    wanted = files()
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return [
        *(f"{folder / name}: missing" for name in sorted(wanted.keys() - found.keys())),
        *(
            f"{folder / name}: not generated from grafana/boards"
            for name in sorted(found.keys() - wanted.keys())
        ),
        *(
            f"{folder / name}: differs from what grafana/boards generates"
            for name in sorted(wanted.keys() & found.keys())
            if wanted[name] != found[name]
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    if arguments == ["--check"]:
        wrong = differences(FOLDER)
        print("\n".join(wrong) or "the dashboards are as generated")
        return 1 if wrong else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for path in FOLDER.glob("*.json"):
        path.unlink()
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
