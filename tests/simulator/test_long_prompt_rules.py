"""What each rule for long prompts buys, in miniature: three minutes of virtual time, made up from a seed.

On a GPU that reads prompts whole, 16,000 tokens stop everybody's answers for a second, and two such prompts
in one iteration for two. Conversations go on all the time beside bursts of long prompts and medium ones.
"""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gateway.mock_backend.gpu_model import PRESETS
from gateway.policy.clock import NANOSECONDS_PER_SECOND
from gateway.policy.request import Priority
from gateway.simulator.workload import (
    CHAT_LENGTHS,
    Caller,
    Lengths,
    PoissonStream,
    ReplayStream,
    TraceRow,
    Workload,
)
from tests.benchmarks.long_prompt_rules import (
    Row,
    Trial,
    by_length,
    carried_tokens_per_second,
    line,
    main,
    parameters_for,
    spread,
)

P0, P1, P2 = Priority
PRESET = PRESETS["seed_32k"]
SECONDS = 180.0


def bursts(lengths: Lengths, requests: int, every_seconds: int) -> list[TraceRow]:
    """So many requests at once, again and again."""
    times = range(0, int(SECONDS), every_seconds)
    return [TraceRow(at * NANOSECONDS_PER_SECOND, lengths) for at in times for _ in range(requests)]


WORKLOAD = Workload(
    open=(
        PoissonStream(Caller(P0, "realtime"), 1.0, CHAT_LENGTHS),
        ReplayStream(Caller(P2, "long"), bursts(Lengths(16_000, 20), 3, 12)),
        ReplayStream(Caller(P2, "medium"), bursts(Lengths(4_000, 20), 3, 3)),
    )
)


def table() -> list[Row]:
    """P2 can pay for all of it, and for a burst at once: otherwise its bucket keeps long prompts apart."""
    parameters = parameters_for(PRESET, 13_000.0, p2_share=0.7)
    parameters = replace(parameters, capacity=replace(parameters.capacity, burst_seconds=6.0))
    trial = Trial(WORKLOAD, PRESET, parameters, seed=1, seconds=SECONDS)
    return [trial.straight(), *trial.rows(alone=True)]


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.title.strip(): row for row in table()}


# ---------------------------------------------------------------------- the direction of each rule


def largest(row: Row) -> float:
    return row.gap[3] or 0.0


def test_the_duty_keeps_stalls_from_most_answers(rows: dict[str, Row]) -> None:
    """Half of P0's answers never stand still for a whole long prompt; without the duty more than half do."""
    on, off = rows["all three rules"].gap[0], rows["without duty"].gap[0]
    assert on is not None
    assert off is not None
    assert off >= 3 * on


def test_pending_prefill_keeps_batch_from_being_read_in_heaps(rows: dict[str, Row]) -> None:
    """Three medium prompts in one iteration stop P0 for as long as all three take, not one."""
    on, off = rows["all three rules"], rows["without pending"]
    assert (off.gap[0] or 0) >= 2 * (on.gap[0] or 0) > 0
    assert (off.ttft[2] or 0) >= 1.3 * (on.ttft[2] or 0) > 0


def test_the_lane_keeps_long_prompts_out_of_one_iteration(rows: dict[str, Row]) -> None:
    """Without the other rules: P0 waits until the one before it is read, not until all three are."""
    on, off = rows["lane alone"], rows["none of the three"]
    assert (off.ttft[1] or 0) >= 1.5 * (on.ttft[1] or 0) > 0
    assert (off.ttft[2] or 0) >= 1.5 * (on.ttft[2] or 0) > 0


def test_pending_prefill_is_a_lane_for_long_prompts(rows: dict[str, Row]) -> None:
    """A prompt above the limit goes alone, so beside it the lane changes nothing."""
    assert line(rows["without lane"])[20:] == line(rows["all three rules"])[20:]


def test_together_they_keep_the_promise(rows: dict[str, Row]) -> None:
    """Straight to the engine, or without the rules, P0 is served worse in each figure; batch gets less."""
    on, none = rows["all three rules"], rows["none of the three"]
    for worse in (rows["straight"], none):
        assert (on.slo_met_of_offered or 0) >= (worse.slo_met_of_offered or 0) + 0.2
        assert (worse.ttft[1] or 0) >= 3 * (on.ttft[1] or 0) > 0
        assert largest(worse) >= 1.4 * largest(on) > 0
    assert on.batch_tokens_per_second < none.batch_tokens_per_second


# ---------------------------------------------------------------------- trace, load, capacity


def test_rows_of_one_stamp_are_spread_over_a_step() -> None:
    """In the order of time, none before its stamp or a step behind it, none lost."""
    stamps = [0, 0, 0, 3, 3, 9]
    rows = [TraceRow(at * NANOSECONDS_PER_SECOND, Lengths(n, 1)) for n, at in enumerate(stamps, start=1)]
    moved = spread(rows, Random(1))
    assert [row.at for row in moved] == sorted({row.at for row in moved})
    by_number = {row.lengths.input_tokens: row.at / NANOSECONDS_PER_SECOND for row in moved}
    assert [by_number[n] // 3 * 3 for n in range(1, 7)] == stamps


def test_short_prompts_are_drawn_and_long_ones_are_batch() -> None:
    rows = [TraceRow(n, Lengths(n, 1)) for n in range(1, 2001)]
    classes = by_length(rows, 1000, (P0, P1), Random(1))
    assert [row.at for row in classes[P2]] == list(range(1001, 2001))
    assert len(classes[P0]) + len(classes[P1]) == 1000
    assert 400 < len(classes[P0]) < 600
    assert by_length(rows, 1000, (P0,), Random(1))[P1] == []


def test_capacity_is_what_the_engine_gets_done() -> None:
    """Prompts of 32,768 tokens with one token of answer: 2.01 s each, for 32,772 weighted tokens."""
    rows = [TraceRow(n, Lengths(32_768, 1)) for n in range(50)]
    carried = carried_tokens_per_second(PRESET, rows, parameters_for(PRESET, 1.0))
    assert carried == pytest.approx(32_772 / 2.01, rel=0.01)


def test_a_share_of_p2_is_taken_from_the_others() -> None:
    classes = parameters_for(PRESET, 1.0, p2_share=0.43).classes
    assert [classes[p].share for p in Priority] == pytest.approx([0.36, 0.21, 0.43])


# ---------------------------------------------------------------------- the command


def write_trace(folder: Path) -> Path:
    random = Random(5)
    lines = ["arrival_s,input_tokens,output_tokens"]
    for second in range(0, 60, 3):
        lines += [f"{second},{random.randint(200, 3000)},{random.randint(20, 300)}" for _ in range(4)]
        lines.append(f"{second},{random.randint(9000, 40_000)},50")
    path = folder / "trace.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_same_seed_gives_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte; another seed another one."""
    arguments = ["--trace", str(write_trace(tmp_path)), "--preset", "seed_32k", "--p2-share", "0.6"]

    def printed(seed: int) -> str:
        assert main([*arguments, "--seed", str(seed)]) == 0
        return capsys.readouterr().out

    first = printed(1)
    assert first == printed(1) != printed(2)
    assert "offers 70% of it" in first
    titles = [text[:20].strip() for text in first.splitlines()[5:]]
    assert [title for title in titles if title] == [
        "straight",
        "shares 25.3% / 14.7%",
        "all three rules",
        "without lane",
        "without duty",
        "without pending",
        "none of the three",
    ]


@pytest.mark.parametrize(
    "bad", [["--load", "0"], ["--p2-share", "1"], ["--seconds", "nan"], ["--trace", "/no"]]
)
def test_options_that_make_no_sense_are_refused(
    bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--trace", str(write_trace(tmp_path)), *bad])
    assert stopped.value.code == 2
    assert bad[-1 if bad[0] == "--trace" else 0] in capsys.readouterr().err
