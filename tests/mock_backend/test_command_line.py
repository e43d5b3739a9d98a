"""`qos-gateway mock-gpu`: what it offers, and what it says to a wrong option."""

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner, Result

from gateway.__main__ import cli
from gateway.mock_backend.faults import FaultKind
from gateway.mock_backend.gpu_model import PRESETS


def run(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(cli, ["mock-gpu", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_its_help_names_every_preset_and_option() -> None:
    said = run(["--help"]).output
    for name in (*PRESETS, "--policy", "--max-num-seqs", "--max-num-queued-reqs", "--restart-after"):
        assert name in said


def test_its_help_has_a_line_for_every_fault() -> None:
    said = run(["--help"]).output.splitlines()
    for kind in FaultKind:
        assert sum(line.strip().startswith((f"{kind}: ", f"{kind}; ")) for line in said) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "h200"], "seed_32k"),
        (["--max-num-queued-reqs", "0"], "max_num_queued_reqs must be at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--fault", "silence"], "'silence' is not of the form NAME=VALUE"),
        (["--fault", "quake=0.1"], "unknown fault 'quake'; known faults: refuse,"),
        (["--fault", "silence=0.7", "--fault", "gzip=0.7"], "come to 1.4, more than 1"),
        (["--restart-after", "-1"], "--restart-after must be at least 0"),
    ],
)
def test_a_wrong_option_ends_it_with_a_reason(arguments: list[str], says: str) -> None:
    result = run(arguments)
    assert result.exit_code == 2
    assert says in result.output
