"""config/prometheus/METRICS.md: every metric with its labels, from the catalogue."""

from collections.abc import Iterator

from gateway.telemetry.catalogue import CATALOGUE, Definition

HEAD = """\
# Every metric

Made by `python -m config.reference` from `gateway/telemetry/catalogue.py`; do not edit. Beside these the page
has the process's own: `process_cpu_seconds_total`, `process_resident_memory_bytes` and others.

* Series of all three classes are there from the start, at 0. What is not known is absent, never −1 or NaN.
* A histogram appears as `…_bucket`, `…_sum` and `…_count`. Its bounds are vLLM's, and every promised latency.
* `priority` is P0, P1 or P2. `tenant` and `model` have at most `metrics.max_label_values` values each
  besides the configured ones, the rest share `other`. Of their pairs there are at most five times as
  many: beyond that the model is `other`.
"""


def metrics_page() -> str:
    return "\n".join([HEAD, *_lines()]) + "\n"


def _lines() -> Iterator[str]:
    yield "| metric | kind | labels | what it says |"
    yield "|---|---|---|---|"
    yield from map(_line, CATALOGUE)


def _line(metric: Definition) -> str:
    labels = " ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"
