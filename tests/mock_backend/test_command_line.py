"""`qos-gateway mock-gpu`: what it offers, and what it says to a wrong option."""

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner, Result

from gateway.__main__ import cli
from gateway.mock_backend.gpu_model import PRESETS


def run(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(cli, ["mock-gpu", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_its_help_names_every_preset_and_option() -> None:
    said = run(["--help"]).output
    for name in (*PRESETS, "--policy", "--max-num-seqs", "--max-num-queued-reqs"):
        assert name in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "h200"], "seed_32k"),
        (["--max-num-queued-reqs", "0"], "max_num_queued_reqs must be at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
    ],
)
def test_a_wrong_option_ends_it_with_a_reason(arguments: list[str], says: str) -> None:
    result = run(arguments)
    assert result.exit_code == 2
    assert says in result.output
