"""Continuous batching on one GPU as arithmetic: no clock, no waiting, durations in whole nanoseconds.

One iteration serves a batch of D decoding sequences, whose context tokens sum to KV, and some pieces of
prompts; a piece is n tokens of a prompt of which `done` tokens are prefilled already, and P = Σ n:

    T_iter [ms] = a + b·P + q·Σ n·(done + n/2) + c·D + d·KV

`a` is the fixed cost of an iteration, `b` the weights' work per prompt token, `q` the attention of a prompt
token to the tokens before it, `c` the work and `d` the memory traffic of decoding. A context counts as it
stands when the iteration begins. The first token of an answer appears at the end of the iteration that ends
its prefill, every further one at the end of an iteration that decodes it.

Order inside an iteration: every decoding sequence, then prefills under way, oldest first, then the queue by
(rank, arrival), where the rank is the priority under the `priority` policy (lower first) and 0 under `fcfs`.
The head of the queue is never bypassed.

* With `chunk_tokens`, decodes (one token each) and prefill share that many tokens an iteration, and what is
  left of a prompt goes on in the next one.
* Without, prompts are prefilled whole: as many as fit into `max_batched_tokens`, or a single larger one.
  Decodes run along, and wait as long as the prompts take: this is the stall a long prompt causes.

KV memory is counted in tokens, not in blocks. A sequence is admitted when its whole prompt fits, which is
then reserved; each decode adds one. When the decodes do not fit, the sequence of the worst (rank, arrival)
loses its memory and goes back to the queue in its old place; later it prefills its prompt and its answer so
far again (vLLM's preemption by recomputation), and nothing is emitted twice. Nobody is admitted in an
iteration that had to preempt. A sequence too large for an empty GPU is refused by `submit`, so there is
always progress.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

NANOSECONDS_PER_MILLISECOND = 1_000_000

SchedulingPolicy = Literal["fcfs", "priority"]
SequenceId = Hashable


@dataclass(frozen=True)
class GpuPreset:
    """A GPU with a model on it; a, b, q, c, d in milliseconds, as in the formula above."""

    name: str
    a: float
    b: float
    q: float
    c: float
    d: float
    kv_tokens: int
    chunk_tokens: int | None = None
    """Token budget of an iteration; None: prompts are prefilled whole."""
    max_batched_tokens: int = 32_768
    """Prompt tokens of an iteration that prefills whole prompts; a single larger prompt goes alone."""
    max_num_seqs: int = 256
    max_model_len: int = 131_072

    def iteration_ns(self, prefill_tokens: int, attention: float, decoding: int, kv_tokens: int) -> int:
        """T_iter for P, Σ n·(done + n/2), D and KV."""
        milliseconds = (
            self.a + self.b * prefill_tokens + self.q * attention + self.c * decoding + self.d * kv_tokens
        )
        return round(milliseconds * NANOSECONDS_PER_MILLISECOND)


PRESETS = {
    preset.name: preset
    for preset in (
        GpuPreset("seed_32k", 10, 0.06104, 0, 0.115, 9.5e-5, 430_000),
        GpuPreset("a100_llama3_8b", 11.3, 0.0665, 2.76e-6, 0.06, 9.5e-5, 430_000, 2048),
        GpuPreset("h100_llama3_8b", 6.9, 0.0226, 1.31e-6, 0.015, 7.6e-5, 430_000, 8192),
        GpuPreset("h100_llama_70b_tp4", 19, 0.067, 1.64e-6, 0.02, 4.8e-5, 460_000, 8192),
    )
}
"""Fitted to published measurements, but for `seed_32k`: 32,768 prompt tokens take 2.0 s, 64 sequences with
80K tokens of context decode in 25.0 ms."""


def find_preset(name: str) -> GpuPreset:
    """The preset of that name, or a ValueError that lists the names there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ValueError(f"unknown GPU preset {name!r}; known presets: {', '.join(PRESETS)}") from None


@dataclass(frozen=True)
class Sequence:
    """One prompt and the length its answer will have."""

    id: SequenceId
    prompt_tokens: int
    output_tokens: int
    """0: only the prompt is worked on, as for an embedding; it ends with its prefill."""
    priority: int = 0
    """Lower goes first, as in vLLM; looked at only under the `priority` policy."""


class Emitted(NamedTuple):
    """A token: which one of its answer, counted from 0, and whether it is the last. For a sequence without
    output tokens it is the end of its prefill."""

    id: SequenceId
    token_index: int
    finished: bool


@dataclass(frozen=True)
class Iteration:
    duration_ns: int
    emitted: list[Emitted]


class _State:
    """What the engine knows of a sequence."""

    __slots__ = ("alive", "ends_in", "generated", "joined_in", "order", "prefilled", "sequence", "target")

    def __init__(self, sequence: Sequence, order: tuple[int, int]) -> None:
        self.sequence = sequence
        self.order = order
        self.alive = True
        self.generated = 0
        """Tokens of the answer; while it decodes, those it had when that began."""
        self.joined_in = self.ends_in = 0
        """The iteration at whose end it began to decode, and the one that decodes its last token."""
        self.prefilled = 0
        self.target = sequence.prompt_tokens
        """Tokens to prefill: the prompt, and after a preemption the answer so far."""

    @property
    def decoding_kv(self) -> int:
        """Tokens of memory while decoding: the newest token of the answer is written by the next decode."""
        return self.sequence.prompt_tokens + self.generated - 1


class _WaitingQueue:
    """Sequences by (rank, arrival). Removal marks; marked ones are dropped when met or in the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], _State]] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, state: _State) -> None:
        heapq.heappush(self._heap, (state.order, state))
        self._size += 1

    def head(self) -> _State | None:
        while self._heap and not self._heap[0][1].alive:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop_head(self) -> None:
        heapq.heappop(self._heap)
        self._size -= 1

    def discard(self, state: _State) -> None:
        state.alive = False
        self._size -= 1
        if len(self._heap) > 2 * self._size + 64:
            self._heap = [entry for entry in self._heap if entry[1].alive]
            heapq.heapify(self._heap)


class GpuEngine:
    """The batch, the queue and the memory of one engine.

    `begin` fixes the batch of an iteration and tells how long it lasts; `end` applies it. Between the two, a
    driver lets that time pass; what is submitted then joins the next batch, what is aborted then gives its
    memory back at once and emits nothing. `step` is both.

    Every decoding sequence gets one token in every iteration. So how far each is need not be written down: it
    follows from the number of iterations, and one that only decodes on costs an iteration nothing.
    """

    def __init__(
        self, preset: GpuPreset, policy: SchedulingPolicy = "fcfs", max_num_seqs: int | None = None
    ) -> None:
        if policy not in ("fcfs", "priority"):
            raise ValueError(f"unknown scheduling policy {policy!r}; known policies: fcfs, priority")
        self.preset = preset
        self.max_num_seqs = preset.max_num_seqs if max_num_seqs is None else max_num_seqs
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}")
        self.kv_tokens_used = 0
        self.preemptions = 0
        self._by_priority = policy == "priority"
        self._max_sequence_tokens = min(preset.max_model_len, preset.kv_tokens)
        self._arrivals = 0
        self._states: dict[SequenceId, _State] = {}
        self._waiting = _WaitingQueue()
        self._prefilling: dict[SequenceId, _State] = {}
        self._decoding: dict[SequenceId, _State] = {}
        self._decoding_kv = 0
        self._iterations = 0
        self._ending: dict[int, list[_State]] = {}  # by the iteration that decodes their last token
        self._under_way = False  # between begin and end
        self._prefills: list[tuple[_State, int]] = []
        self.preempted: list[SequenceId] = []
        """Those that lost their memory when the last iteration began."""

    @property
    def running(self) -> int:
        """Sequences that hold a place and memory, prefilling or decoding."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """The part of the KV memory that is taken, 0 to 1."""
        return self.kv_tokens_used / self.preset.kv_tokens

    def has_work(self) -> bool:
        return bool(self._states)

    def submit(self, sequence: Sequence) -> None:
        if sequence.prompt_tokens < 1 or sequence.output_tokens < 0:
            raise ValueError(f"a prompt has at least one token, an answer none or more: {sequence}")
        if sequence.prompt_tokens + sequence.output_tokens > self._max_sequence_tokens:
            raise ValueError(f"over {self._max_sequence_tokens} tokens, this never fits: {sequence}")
        if sequence.id in self._states:
            raise ValueError(f"a sequence of this id is queued or running: {sequence}")
        self._arrivals += 1
        rank = sequence.priority if self._by_priority else 0
        state = self._states[sequence.id] = _State(sequence, (rank, self._arrivals))
        self._waiting.push(state)

    def abort(self, id: SequenceId) -> bool:
        """Forget a sequence, whatever it is doing; False when there is none of that id (any more)."""
        state = self._states.get(id)
        if state is None:
            return False
        if id in self._decoding or id in self._prefilling:
            self._stop_running(state)
            state.alive = False
        else:
            self._waiting.discard(state)
        del self._states[id]
        return True

    def step(self) -> Iteration:
        duration_ns = self.begin()
        return Iteration(duration_ns, self.end())

    def begin(self) -> int:
        """Fix the next batch and return its duration in nanoseconds."""
        if self._under_way:
            raise RuntimeError("an iteration is under way; end it first")
        if not self._states:
            raise RuntimeError("nothing to do; ask has_work() first")
        self._preempt_until_decodes_fit()
        self._under_way = True
        self._prefills = self._choose_prefills(admit=not self.preempted)
        attention = 0.0
        prefill_tokens = 0
        for state, n in self._prefills:
            attention += n * (state.prefilled + n / 2)
            prefill_tokens += n
        return self.preset.iteration_ns(prefill_tokens, attention, len(self._decoding), self._decoding_kv)

    def end(self) -> list[Emitted]:
        """Apply the batch fixed by `begin`; the tokens it produced, but for those of aborted sequences."""
        decoded = [
            Emitted(state.sequence.id, self._generated(state), state.ends_in == self._iterations + 1)
            for state in self._decoding.values()
        ]
        brief = self.end_briefly()
        ended = sum(finished for _, _, finished in decoded)
        return decoded + brief[ended:]

    def end_briefly(self) -> list[Emitted]:
        """As `end`, but of the decoded tokens it tells only the last ones of answers."""
        if not self._under_way:
            raise RuntimeError("no iteration is under way; begin one first")
        self._under_way = False
        self._iterations += 1
        self.kv_tokens_used += len(self._decoding)
        self._decoding_kv += len(self._decoding)
        emitted = []
        for state in self._ending.pop(self._iterations, ()):
            if state.ends_in == self._iterations:
                self._stop_running(state)
                emitted.append(self._last_token(state))
        prefills, self._prefills = self._prefills, []
        for state, n in prefills:
            if not state.alive:
                continue
            state.prefilled += n
            if state.prefilled == state.target:
                emitted.append(self._end_prefill(state))
        return emitted

    def _generated(self, state: _State) -> int:
        """Tokens of the answer of a decoding sequence so far."""
        return state.generated + self._iterations - state.joined_in

    def _preempt_until_decodes_fit(self) -> None:
        self.preempted = []
        while self.kv_tokens_used + len(self._decoding) > self.preset.kv_tokens:
            victim = max(
                (*self._prefilling.values(), *self._decoding.values()), key=lambda state: state.order
            )
            self._stop_running(victim)
            victim.prefilled = 0
            victim.target = victim.sequence.prompt_tokens + victim.generated
            self._waiting.push(victim)
            self.preemptions += 1
            self.preempted.append(victim.sequence.id)

    def _choose_prefills(self, admit: bool) -> list[tuple[_State, int]]:
        """The prompt pieces of this batch: those under way, then, if `admit`, from the queue."""
        chunk = self.preset.chunk_tokens
        whole = chunk is None
        budget = self.preset.max_batched_tokens if chunk is None else max(0, chunk - len(self._decoding))
        pieces: list[tuple[_State, int]] = []
        for state in self._prefilling.values():
            if budget == 0:
                return pieces
            n = min(state.target - state.prefilled, budget)
            pieces.append((state, n))
            budget -= n
        kv_limit = self.preset.kv_tokens - len(self._decoding)  # every decode is about to add a token
        while admit and budget > 0 and self.running < self.max_num_seqs:
            head = self._waiting.head()
            if head is None or self.kv_tokens_used + head.target > kv_limit:
                break
            n = head.target
            if n > budget:
                if whole and pieces:
                    break
                n = n if whole else budget
            self._admit(head)
            pieces.append((head, n))
            budget = max(0, budget - n)
        return pieces

    def _admit(self, state: _State) -> None:
        self._waiting.pop_head()
        self._prefilling[state.sequence.id] = state
        self.kv_tokens_used += state.target

    def _end_prefill(self, state: _State) -> Emitted:
        """Its token; unless that is the last one, it decodes from the next iteration on."""
        sequence = state.sequence
        state.generated += 1
        missing = sequence.output_tokens - state.generated
        if missing <= 0:
            self._stop_running(state)
            return self._last_token(state)
        del self._prefilling[sequence.id]
        self._decoding[sequence.id] = state
        self._decoding_kv += state.target
        state.joined_in = self._iterations
        state.ends_in = self._iterations + missing
        self._ending.setdefault(state.ends_in, []).append(state)
        return Emitted(sequence.id, state.generated - 1, False)

    def _last_token(self, state: _State) -> Emitted:
        state.alive = False
        del self._states[state.sequence.id]
        return Emitted(state.sequence.id, state.generated - 1, True)

    def _stop_running(self, state: _State) -> None:
        """Take a sequence out of the batch and its memory back."""
        if self._decoding.pop(state.sequence.id, None) is not None:
            state.generated = self._generated(state)
            state.ends_in = 0
            self._decoding_kv -= state.decoding_kv
            self.kv_tokens_used -= state.decoding_kv
        else:
            del self._prefilling[state.sequence.id]
            self.kv_tokens_used -= state.target
