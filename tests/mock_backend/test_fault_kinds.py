"""How faults of the mock GPU are written, checked and drawn."""

import json
import re
from collections import Counter

import pytest

from gateway.mock_backend.faults import (
    KINDS,
    Fault,
    FaultKind,
    FaultOptions,
    FaultTable,
    decode_table,
    kinds_help,
    make_fault,
    parse_fault,
    parse_table,
)
from gateway.mock_backend.faulty_answers import CARRIED_OUT

LONGEST_HELP_LINE = 78


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gzip", Fault(FaultKind.GZIP)),
        ("silence", Fault(FaultKind.SILENCE, after=1)),
        ("reset_mid_stream; after=3", Fault(FaultKind.RESET_MID_STREAM, after=3)),
        (" reset_mid_stream;after = 0;", Fault(FaultKind.RESET_MID_STREAM, after=0)),
        ("huge_event; bytes=10; after=2", Fault(FaultKind.HUGE_EVENT, after=2, bytes=10)),
        ("drip; seconds=0.5", Fault(FaultKind.DRIP, seconds=0.5)),
        ("crash", Fault(FaultKind.CRASH, after=None)),
    ],
)
def test_a_fault_and_its_parameters(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_is_described_and_carried_out(kind: FaultKind) -> None:
    """On one line of the help, which is itself a fault as the header has it."""
    assert kind in CARRIED_OUT
    (line,) = [line for line in kinds_help() if line.partition(":")[0].split(";")[0] == kind]
    assert len(line) <= LONGEST_HELP_LINE
    assert parse_fault(line.partition(":")[0]) == make_fault(kind, {})
    assert parse_fault(str(make_fault(kind, {}))) == make_fault(kind, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown fault ''; known faults: refuse, reset_before_headers"),
        ("Silence", "unknown fault 'Silence'"),
        ("silence=0.1", "unknown fault 'silence=0.1'"),
        ("silence; 3", "'3' is not of the form NAME=VALUE"),
        ("silence; seconds=3", "silence has no parameter 'seconds'; its parameters are: after"),
        ("gzip; after=3", "gzip has no parameter 'after'; it has none"),
        ("silence; after=2.5", "after of silence must be a whole number from 0 to 1000000000, not '2.5'"),
        ("silence; after=-1", "after of silence must be a whole number"),
        ("silence; after=many", "after of silence must be a whole number"),
        ("long_length; bytes=0", "bytes of long_length must be a whole number from 1"),
        ("drip; seconds=nan", "seconds of drip must be a number from 0 to 86400, not 'nan'"),
        ("drip; seconds=1e9", "seconds of drip must be a number"),
        ("drip; seconds=-0.1", "seconds of drip must be a number"),
    ],
)
def test_what_is_no_fault_is_told_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_fault(text)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["silence"], "'silence' is not of the form NAME=VALUE"),
        (["silence=often"], "the probability of silence must be from 0 to 1, not 'often'"),
        (["silence=nan"], "the probability of silence must be from 0 to 1"),
        (["silence=1.5"], "the probability of silence must be from 0 to 1, not 1.5"),
        (["silence=-0.1"], "the probability of silence must be from 0 to 1, not -0.1"),
        (["quake=0.1"], "unknown fault 'quake'"),
        (["silence=0.6", "gzip=0.6"], "the probabilities of faults of requests come to 1.2, more than 1"),
        (["slow_health=0.6", "health_500=0.5"], "the probabilities of faults of probes come to 1.1"),
    ],
)
def test_what_is_no_table_is_told_why(texts: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_table(texts)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "JSON list of objects"),
        (b'{"kind": "silence"}', "JSON list of objects"),
        (b'["silence"]', "JSON list of objects"),
        (b"[{}]", "the probability of"),
        (b'[{"probability": 0.5}]', "unknown fault ''"),
        (b'[{"kind": "silence"}]', "the probability of silence must be from 0 to 1, not None"),
        (b'[{"kind": "silence", "probability": true}]', "not True"),
        (b'[{"kind": "silence", "probability": 2}]', "must be from 0 to 1, not 2"),
        (b'[{"kind": "silence", "probability": 1, "after": [1]}]', "after of silence must be"),
        (b'[{"kind": "silence", "probability": 1, "often": 1}]', "no parameter 'often'"),
    ],
)
def test_what_is_no_table_in_json_is_told_why(body: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        decode_table(body)


def test_requests_and_probes_have_a_whole_each() -> None:
    """What strikes requests leaves nothing less for probes; tenths may add up to one."""
    table = parse_table(["error_500=0.1"] * 10 + ["health_500=1"])
    assert len(table.entries) == 11


def test_a_table_draws_by_its_probabilities() -> None:
    """Of rolls spread evenly, each fault gets its share and nothing the rest; probes get their own."""
    table = parse_table(["silence=0.2; after=3", "gzip=0.3", "health_500=0.5"])
    rolls = [n / 1000 for n in range(1000)]
    drawn = Counter(str(table.draw(roll, probe=False)) for roll in rolls)
    assert drawn == {"silence; after=3": 200, "gzip": 300, "None": 500}
    assert Counter(str(table.draw(roll, probe=True)) for roll in rolls) == {"health_500": 500, "None": 500}


def test_no_table_draws_nothing() -> None:
    assert FaultTable().draw(0.0, probe=False) is None
    assert parse_table(["silence=0"]).draw(0.0, probe=False) is None


def test_a_table_survives_json_and_the_command_line() -> None:
    """What a supervisor hands to its child, and what `/faults` tells, mean the same table."""
    table = parse_table([f"{kind}=0.05" for kind in KINDS] + ["drip=1e-07; seconds=0.25"])
    assert decode_table(json.dumps(table.members()).encode()) == table
    arguments = FaultOptions(table, seed=-3, allowed=True).arguments()
    assert parse_table(arguments[1 : 2 * len(table.entries) : 2]) == table
    assert arguments[-3:] == ["--fault-seed", "-3", "--allow-faults"]
    assert FaultOptions().arguments() == []
