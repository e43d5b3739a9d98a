"""The end of a soak run: what the clients saw, what the gateway says, and whether the two agree."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tests.soak.clients import Seen
from tests.soak.processes import AFTERMATH_SECONDS, Outage
from tests.soak.report import Check, none_of
from tests.soak.traffic import CUT_SHORT, DONE_WELL, KINDS, may_end

CACHE_WEIGHT, OUTPUT_WEIGHT = 0.1, 4.0
WEIGHTS = {"P0": 1.0, "P1": 2.0, "P2": 0.5}
Line = dict[str, Any]


class Books:
    """Clients' records and log lines, brought together by request id."""

    def __init__(self, seen: Sequence[Seen], lines: Sequence[Line], outages: Sequence[Outage]) -> None:
        self.seen = seen
        self._outages = outages
        self.lines: dict[str, list[Line]] = defaultdict(list)
        for line in lines:
            self.lines[line["request_id"]].append(line)

    def checks(self) -> list[Check]:
        failed = [each for each in self.seen if each.status is not None and each.status >= 500]
        answered = [each for each in self.seen if each.own is not None]
        return [
            none_of("requests without exactly one log line", self._without_one_line(), len(self.seen)),
            none_of("log lines that no client sent", self.lines.keys() - {s.plan.id for s in self.seen}),
            none_of("clients that got no answer, or another's id", self._faults(), len(self.seen)),
            none_of(
                "answers with another request's text", _names(s for s in answered if not s.own), len(answered)
            ),
            none_of("5xx without a fault that was injected", self._unexplained(failed), len(failed)),
            none_of("other endings than the request's kind allows", self._unexplained(self.seen)),
            none_of("statuses that client and log tell differently", self._contradictions()),
            none_of("completed streams and answers that were cut", self._cut()),
            none_of("costs that are not the formula of what was used", self._wrong_costs()),
        ]

    def spent(self) -> dict[str, int]:
        """Millitokens charged, by class."""
        total = dict.fromkeys(WEIGHTS, 0)
        for (line,) in self._single():
            total[line["priority"]] += round(line["cost"] * 1000)
        return total

    def table(self) -> list[str]:
        """How each kind of request ended, in numbers."""
        endings: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        for each in self.seen:
            for line in self.lines[each.plan.id]:
                endings[each.plan.kind][line["outcome"]] += 1
        return [
            f"  {kind:24}{sum(counts.values()):8,}  "
            + ", ".join(f"{count:,} {outcome}" for outcome, count in counts.most_common())
            for kind, counts in endings.items()
        ]

    # ------------------------------------------------------------------ inside

    def _single(self) -> Iterable[list[Line]]:
        return (lines for lines in self.lines.values() if len(lines) == 1)

    def _line(self, seen: Seen) -> Line | None:
        lines = self.lines.get(seen.plan.id, [])
        return lines[0] if len(lines) == 1 else None

    def _told(self, seen: Seen) -> str:
        line = self._line(seen) or {}
        known = {name: line.get(name) for name in ("outcome", "status", "upstream", "requeued", "priority")}
        return f"{seen.plan.id} ({seen.plan.kind}): client saw {seen.status} {seen.outcome}, log has {known}"

    def _without_one_line(self) -> Iterable[str]:
        return (s.plan.id for s in self.seen if len(self.lines.get(s.plan.id, [])) != 1)

    def _faults(self) -> Iterable[str]:
        return (f"{self._told(s)}: {s.fault}" for s in self.seen if s.fault is not None)

    def _in_outage(self, seen: Seen, line: Line) -> bool:
        """Whether the engine that it was sent to (any, if to none or to two) was away meanwhile. A request
        whose client has left may still run for a moment."""
        sent_to = line["upstream"]
        return any(
            outage.meets(seen.sent_at, seen.ended_at + AFTERMATH_SECONDS)
            for outage in self._outages
            if sent_to is None or line.get("requeued") or outage.engine == sent_to
        )

    def _unexplained(self, among: Iterable[Seen]) -> Iterable[str]:
        for seen in among:
            line = self._line(seen)
            if line is not None:
                in_outage = self._in_outage(seen, line)
                if not may_end(seen.plan, line["outcome"], seen.status, in_outage):
                    yield self._told(seen)

    def _contradictions(self) -> Iterable[str]:
        for seen in self.seen:
            line = self._line(seen)
            if line is None or seen.status is None:
                continue
            if line["status"] != seen.status or seen.outcome not in (None, line["outcome"]):
                yield self._told(seen)

    def _cut(self) -> Iterable[str]:
        for seen in self.seen:
            line = self._line(seen)
            reads_all = (
                KINDS[seen.plan.kind].endings.items() >= DONE_WELL.items() and seen.plan.kind[:6] != "leaves"
            )
            if line is not None and reads_all and line["outcome"] == "completed" and not seen.whole:
                yield self._told(seen)

    def _wrong_costs(self) -> Iterable[str]:
        plans = {seen.plan.id: seen.plan for seen in self.seen}
        for (line,) in self._single():
            used = (line["input_tokens"], line["cached_tokens"], line["output_tokens"])
            if used[0] is None:
                right = line["cost"] == 0
            else:
                fresh = used[0] - used[1] * (1 - CACHE_WEIGHT)
                cost = WEIGHTS[line["priority"]] * (fresh + OUTPUT_WEIGHT * used[2])
                right = abs(line["cost"] - max(cost, 1)) <= 0.0006
            plan = plans.get(line["request_id"])
            if plan is not None and line["outcome"] == "completed" and plan.kind not in CUT_SHORT:
                right = right and used == (plan.prompt, plan.cached, plan.completion)
            if not right:
                yield f"{line['request_id']}: used {used}, cost {line['cost']}, {line['outcome']}, {plan}"


def _names(seen: Iterable[Seen]) -> Iterable[str]:
    return (f"{each.plan.id} ({each.plan.kind})" for each in seen)
