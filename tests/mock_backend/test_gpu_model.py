"""The GPU model: durations that can be checked in the head, the order of work, and memory that adds up."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.mock_backend.gpu_model import (
    PRESETS,
    Emitted,
    GpuEngine,
    GpuPreset,
    SchedulingPolicy,
    Sequence,
    find_preset,
)

SEED = PRESETS["seed_32k"]
A100 = PRESETS["a100_llama3_8b"]
PLAIN = GpuPreset("plain", a=1, b=1, q=0, c=0, d=0, kv_tokens=1000)
"""One millisecond and one more for each prompt token."""


def finishing_order(engine: GpuEngine) -> list[object]:
    order: list[object] = []
    while engine.has_work():
        order += [token.id for token in engine.step().emitted if token.finished]
    return order


def test_presets_are_found_by_name_and_an_unknown_one_lists_them() -> None:
    assert set(PRESETS) == {"seed_32k", "a100_llama3_8b", "h100_llama3_8b", "h100_llama_70b_tp4"}
    assert find_preset("seed_32k") is SEED
    with pytest.raises(ValueError, match=r"'h200'.*seed_32k, a100_llama3_8b, h100_llama3_8b"):
        find_preset("h200")


def test_seed_prefills_32k_tokens_in_one_iteration_of_two_seconds() -> None:
    """10 + 0.06104 × 32,768 = 2010.15872 ms, one token at its end."""
    engine = GpuEngine(SEED)
    engine.submit(Sequence("long", 32_768, 1))
    iteration = engine.step()
    assert iteration.duration_ns == 2_010_158_720
    assert iteration.emitted == [Emitted("long", 0, True)]


def test_a_sequence_without_output_ends_with_its_prefill() -> None:
    """It takes the time of its prompt, runs beside others, and its memory is free again at the end."""
    engine = GpuEngine(PLAIN)
    engine.submit(Sequence("embedding", 30, 0))
    engine.submit(Sequence("answer", 10, 2))
    first = engine.step()
    assert first.duration_ns == 41_000_000
    assert first.emitted == [Emitted("embedding", 0, True), Emitted("answer", 0, False)]
    assert (engine.running, engine.kv_tokens_used) == (1, 10)
    assert engine.step().emitted == [Emitted("answer", 1, True)]
    assert engine.kv_tokens_used == 0


def test_seed_decodes_64_sequences_in_25_milliseconds() -> None:
    """10 + 0.115 × 64 + 9.5e-5 × 80,000 = 24.96 ms."""
    assert SEED.iteration_ns(prefill_tokens=0, attention=0, decoding=64, kv_tokens=80_000) == 24_960_000


def test_chunked_prefill_pays_attention_to_what_is_prefilled_already() -> None:
    """5000 tokens as 2048 + 2048 + 904: 11.3 + 0.0665·n + 2.76e-6·n·(done + n/2) ms each."""
    engine = GpuEngine(A100)
    engine.submit(Sequence("a", 5000, 1))
    first, second, third = engine.step(), engine.step(), engine.step()
    assert first.duration_ns == 153_280_140  # 11.3 + 136.192 + 5.78813952
    assert second.duration_ns == 164_856_419  # 11.3 + 136.192 + 17.36441856
    assert third.duration_ns == 82_763_442  # 11.3 + 60.116 + 11.34744192
    assert (first.emitted, second.emitted) == ([], [])
    assert third.emitted == [Emitted("a", 0, True)]


def test_context_counts_as_it_stands_when_the_iteration_begins() -> None:
    """A prompt of 100 decodes over 100, 101, 102 … tokens."""
    engine = GpuEngine(GpuPreset("kv", a=0, b=0, q=0, c=0, d=1, kv_tokens=1000))
    engine.submit(Sequence("a", 100, 4))
    durations_ms = [engine.step().duration_ns / 1e6 for _ in range(4)]
    assert durations_ms == [0, 100, 101, 102]


def test_a_long_prompt_stalls_everybody_who_decodes() -> None:
    """64 streams at 25 ms a token, then one 32K prompt: their largest gap becomes 2 s, once."""
    engine = GpuEngine(SEED)
    for id in range(64):
        engine.submit(Sequence(id, 1250, 1000))
    for _ in range(3):
        engine.step()
    before = [engine.step().duration_ns / 1e6 for _ in range(20)]
    assert 24.9 < min(before) <= max(before) < 25.2
    engine.submit(Sequence("long", 32_768, 1))
    stall = engine.step()
    assert {token.id for token in stall.emitted} == {*range(64), "long"}
    assert 2020 < stall.duration_ns / 1e6 < 2030
    assert engine.step().duration_ns / 1e6 < 25.2


def test_chunking_bounds_the_stall() -> None:
    """The same on a chunked engine: no gap is longer than one chunk takes, with attention to 32K tokens."""
    engine = GpuEngine(A100)
    for id in range(64):
        engine.submit(Sequence(id, 100, 1000))
    engine.submit(Sequence("long", 32_768, 1))
    gaps_ms = []
    while True:
        iteration = engine.step()
        gaps_ms.append(iteration.duration_ns / 1e6)
        if any(token.id == "long" for token in iteration.emitted):
            break
    assert len(gaps_ms) >= 16
    assert max(gaps_ms) < 11.3 + 0.0665 * 2048 + 2.76e-6 * 2048 * 32_768 + 64 * 0.06 + 64 * 150 * 9.5e-5


def test_decodes_take_their_part_of_the_chunk_and_the_oldest_prefill_goes_on_first() -> None:
    """Chunk 10, one decoding: 9 tokens for the prompts, all to the older until it is through."""
    engine = GpuEngine(replace(PLAIN, chunk_tokens=10))
    engine.submit(Sequence("decoding", 1, 100))
    assert engine.begin() == 2_000_000
    engine.submit(Sequence("older", 12, 1))
    engine.submit(Sequence("younger", 9, 1))
    engine.end()
    seen = [
        (it.duration_ns // 1_000_000 - 1, [t.id for t in it.emitted]) for it in (engine.step() for _ in "123")
    ]
    assert seen == [(9, ["decoding"]), (9, ["decoding", "older"]), (3, ["decoding", "younger"])]


def test_without_chunks_short_prompts_share_an_iteration_and_a_large_one_goes_alone() -> None:
    engine = GpuEngine(replace(PLAIN, max_batched_tokens=10))
    for id, prompt_tokens in (("a", 4), ("b", 6), ("c", 20), ("d", 5)):
        engine.submit(Sequence(id, prompt_tokens, 1))
    batches = [[token.id for token in engine.step().emitted] for _ in range(3)]
    assert batches == [["a", "b"], ["c"], ["d"]]
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", ["first", "p5", "p0", "p1", "p0-later"]), ("priority", None)]
)
def test_the_queue_goes_by_arrival_or_by_priority(policy: SchedulingPolicy, order: list[str] | None) -> None:
    """Lower numbers first under `priority`, arrival breaks ties; who runs already is not displaced."""
    engine = GpuEngine(PLAIN, policy, max_num_seqs=1)
    engine.submit(Sequence("first", 1, 2, priority=9))
    engine.step()
    for id, priority in (("p5", 5), ("p0", 0), ("p1", 1), ("p0-later", 0)):
        engine.submit(Sequence(id, 1, 2, priority))
    assert finishing_order(engine) == (order or ["first", "p0", "p0-later", "p1", "p5"])


def test_no_more_sequences_run_than_max_num_seqs() -> None:
    engine = GpuEngine(PLAIN, max_num_seqs=2)
    for id in range(3):
        engine.submit(Sequence(id, 1, 2))
    assert [token.id for token in engine.step().emitted] == [0, 1]
    assert (engine.running, engine.waiting) == (2, 1)


def test_a_prompt_that_does_not_fit_into_memory_waits_and_is_not_overtaken() -> None:
    engine = GpuEngine(replace(PLAIN, kv_tokens=10))
    engine.submit(Sequence("a", 6, 2))
    engine.submit(Sequence("large", 6, 1))
    engine.submit(Sequence("small", 1, 1))
    assert [token.id for token in engine.step().emitted] == ["a"]
    assert (engine.running, engine.waiting, engine.kv_tokens_used) == (1, 2, 6)
    assert engine.kv_usage == 0.6
    assert [token.id for token in engine.step().emitted] == ["a"]
    assert [token.id for token in engine.step().emitted] == ["large", "small"]
    assert engine.kv_tokens_used == 0


def test_an_admission_leaves_room_for_the_tokens_being_decoded() -> None:
    """6 of 10 tokens are taken and one is about to be added: a prompt of 4 has to wait."""
    engine = GpuEngine(replace(PLAIN, kv_tokens=10))
    engine.submit(Sequence("a", 6, 3))
    engine.step()
    engine.submit(Sequence("b", 4, 1))
    assert [token.id for token in engine.step().emitted] == ["a"]
    assert [token.id for token in engine.step().emitted] == ["a"]
    assert [token.id for token in engine.step().emitted] == ["b"]
    assert engine.preemptions == 0


def test_nobody_is_admitted_in_an_iteration_that_had_to_preempt() -> None:
    engine = GpuEngine(replace(PLAIN, kv_tokens=10), "priority")
    engine.submit(Sequence("a", 4, 5))
    engine.submit(Sequence("b", 4, 5))
    engine.step()
    engine.step()
    engine.submit(Sequence("urgent", 1, 1, priority=-1))
    assert [token.id for token in engine.step().emitted] == ["a"]
    assert engine.preemptions == 1
    assert [token.id for token in engine.step().emitted] == ["a", "urgent"]


def test_the_newest_is_preempted_when_memory_runs_out_and_recomputed_later() -> None:
    """Two prompts of 4 with answers of 5 in 10 tokens of memory: the third iteration has room for one."""
    engine = GpuEngine(replace(PLAIN, kv_tokens=10))
    engine.submit(Sequence("a", 4, 5))
    engine.submit(Sequence("b", 4, 5))
    iterations = [engine.step() for _ in range(8)]
    tokens = [[(token.id, token.token_index) for token in iteration.emitted] for iteration in iterations]
    assert tokens[:2] == [[("a", 0), ("b", 0)], [("a", 1), ("b", 1)]]
    assert tokens[2:5] == [[("a", 2)], [("a", 3)], [("a", 4)]]
    assert tokens[5:] == [[("b", 2)], [("b", 3)], [("b", 4)]]
    assert iterations[5].duration_ns == 7_000_000  # 1 + the prompt of 4 + the 2 tokens answered so far
    assert engine.preemptions == 1
    assert (engine.kv_tokens_used, engine.has_work()) == (0, False)


def test_under_priority_the_least_urgent_is_preempted() -> None:
    engine = GpuEngine(replace(PLAIN, kv_tokens=10), "priority")
    engine.submit(Sequence("batch", 4, 5, priority=2))
    engine.submit(Sequence("realtime", 4, 5, priority=0))
    assert finishing_order(engine) == ["realtime", "batch"]
    assert engine.preemptions == 1


def test_what_can_never_fit_is_refused() -> None:
    engine = GpuEngine(replace(PLAIN, kv_tokens=10))
    with pytest.raises(ValueError, match="never fits"):
        engine.submit(Sequence("a", 10, 1))
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(Sequence("a", 0, 1))
    engine.submit(Sequence("a", 1, 1))
    with pytest.raises(ValueError, match="queued or running"):
        engine.submit(Sequence("a", 1, 1))


def test_settings_and_calls_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs"):
        GpuEngine(SEED, max_num_seqs=0)
    with pytest.raises(ValueError, match="known policies"):
        GpuEngine(SEED, "lifo")  # type: ignore[arg-type]
    engine = GpuEngine(SEED)
    with pytest.raises(RuntimeError, match="nothing to do"):
        engine.begin()
    with pytest.raises(RuntimeError, match="begin one first"):
        engine.end()
    engine.submit(Sequence("a", 1, 1))
    engine.begin()
    with pytest.raises(RuntimeError, match="end it first"):
        engine.begin()


def test_abort_while_waiting() -> None:
    engine = GpuEngine(PLAIN, max_num_seqs=1)
    for id in "abc":
        engine.submit(Sequence(id, 1, 2))
    engine.step()
    assert engine.abort("b")
    assert engine.waiting == 1
    assert finishing_order(engine) == ["a", "c"]


@pytest.mark.parametrize("iterations_before", [0, 1])
def test_abort_between_begin_and_end_of_a_prefill(iterations_before: int) -> None:
    """In its first chunk or in its second: nothing is emitted and the memory is back at once."""
    engine = GpuEngine(replace(PLAIN, chunk_tokens=5))
    engine.submit(Sequence("a", 8, 2))
    for _ in range(iterations_before):
        engine.step()
    engine.begin()
    assert engine.abort("a")
    assert engine.kv_tokens_used == 0
    assert engine.end() == []
    assert not engine.has_work()


def test_abort_between_begin_and_end_of_a_decode() -> None:
    engine = GpuEngine(PLAIN)
    engine.submit(Sequence("a", 8, 10))
    engine.submit(Sequence("b", 8, 10))
    engine.step()
    engine.begin()
    assert engine.abort("a")
    assert engine.end() == [Emitted("b", 1, False)]
    assert engine.kv_tokens_used == 9


def test_abort_after_a_preemption() -> None:
    engine = GpuEngine(replace(PLAIN, kv_tokens=10))
    engine.submit(Sequence("a", 4, 5))
    engine.submit(Sequence("b", 4, 5))
    for _ in range(3):
        engine.step()
    assert engine.preemptions == 1
    assert engine.abort("b")
    assert finishing_order(engine) == ["a"]


def test_abort_of_what_has_finished_or_never_was_says_so() -> None:
    engine = GpuEngine(PLAIN)
    engine.submit(Sequence("a", 1, 1))
    engine.step()
    assert not engine.abort("a")
    assert not engine.abort("never")


def test_an_id_can_be_used_again_while_its_old_iteration_ends() -> None:
    engine = GpuEngine(PLAIN)
    engine.submit(Sequence("a", 1, 3))
    engine.step()
    engine.begin()
    engine.abort("a")
    engine.submit(Sequence("a", 1, 1))
    assert engine.end() == []
    assert engine.step().emitted == [Emitted("a", 0, True)]


def test_thousands_of_aborts_in_the_queue_leave_it_in_order() -> None:
    engine = GpuEngine(PLAIN, max_num_seqs=1)
    for id in range(5000):
        engine.submit(Sequence(id, 1, 1))
    for id in range(5000):
        if id % 1000:
            engine.abort(id)
    assert engine.waiting == 5
    assert finishing_order(engine) == [0, 1000, 2000, 3000, 4000]


TINY = GpuPreset("tiny", a=1, b=0.1, q=0.01, c=0.1, d=0.01, kv_tokens=24, max_num_seqs=4)
SUBMIT = st.tuples(st.just("submit"), st.integers(1, 12), st.integers(1, 10), st.integers(-2, 2))
ABORT = st.tuples(st.just("abort"), st.integers(0, 20), st.just(0), st.just(0))
HALF_STEP = st.tuples(st.just("half_step"), st.just(0), st.just(0), st.just(0))


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(st.one_of(SUBMIT, ABORT, HALF_STEP, HALF_STEP), max_size=60),
    chunk=st.sampled_from([None, 1, 3, 8]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_memory_and_tokens_are_conserved(
    actions: list[tuple[str, int, int, int]], chunk: int | None, policy: SchedulingPolicy
) -> None:
    """Whatever comes when: limits hold, each token comes once and in order, all memory returns."""
    preset = replace(TINY, chunk_tokens=chunk)
    engine = GpuEngine(preset, policy)
    lengths: dict[object, int] = {}
    aborted: set[object] = set()
    received: dict[object, list[int]] = defaultdict(list)
    under_way = False

    def half_step() -> None:
        nonlocal under_way
        if under_way:
            for id, token_index, finished in engine.end():
                assert id not in aborted
                assert finished == (token_index == lengths[id] - 1)
                received[id].append(token_index)
        elif engine.has_work():
            assert engine.begin() > 0
        else:
            return
        under_way = not under_way

    for number, (action, first, second, priority) in enumerate(actions):
        if action == "submit":
            lengths[number] = second
            engine.submit(Sequence(number, first, second, priority))
        elif action == "abort":
            if engine.abort(first):
                aborted.add(first)
        else:
            half_step()
        unfinished = [id for id in lengths if id not in aborted and len(received[id]) < lengths[id]]
        assert engine.running + engine.waiting == len(unfinished)
        assert engine.running <= preset.max_num_seqs
        assert 0 <= engine.kv_tokens_used <= preset.kv_tokens
        assert engine.running > 0 or engine.kv_tokens_used == 0
    while engine.has_work() or under_way:
        half_step()
    assert engine.kv_tokens_used == engine.running == engine.waiting == 0
    for id, length in lengths.items():
        expected = list(range(length))
        assert received[id] == (expected[: len(received[id])] if id in aborted else expected)
    assert as_if_new(engine) == as_if_new(GpuEngine(preset, policy))


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(st.one_of(SUBMIT, ABORT, HALF_STEP, HALF_STEP, HALF_STEP), max_size=60),
    chunk=st.sampled_from([None, 1, 3, 8]),
)
def test_a_brief_end_tells_first_and_last_tokens(
    actions: list[tuple[str, int, int, int]], chunk: int | None
) -> None:
    """Whatever comes when, it is the same iterations, without the tokens in between."""
    told, brief = (GpuEngine(replace(TINY, chunk_tokens=chunk)) for _ in range(2))
    under_way = False
    for number, (action, first, second, priority) in enumerate(actions):
        if action == "submit":
            for engine in (told, brief):
                engine.submit(Sequence(number, first, second, priority))
        elif action == "abort":
            assert told.abort(first) == brief.abort(first)
        elif under_way:
            whole, part = told.end(), brief.end_briefly()
            assert [t for t in whole if t.token_index == 0 or t.finished or t in part] == part
            under_way = False
        elif told.has_work():
            assert told.begin() == brief.begin()
            assert told.preempted == brief.preempted
            under_way = True
        assert (told.running, told.kv_tokens_used) == (brief.running, brief.kv_tokens_used)


def as_if_new(engine: GpuEngine) -> list[int]:
    """Durations of a small workload, which would show any context still counted from earlier."""
    engine.submit(Sequence("x", 5, 4))
    engine.submit(Sequence("y", 7, 3))
    durations = []
    while engine.has_work():
        durations.append(engine.step().duration_ns)
    return durations
