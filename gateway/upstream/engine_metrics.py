"""An engine's own metrics page → its load, under the names of vLLM, SGLang and llama.cpp.

A page has 60 KB and hundreds of series, a handful of which say how full the engine is. It is read between two
pieces of streams that are being relayed, so it is not parsed: one expression finds those lines, the rest is
passed over.

Several series of one name are parts of one engine, such as data-parallel ranks. Requests and sizes are added
up. Of the used fractions the largest counts: a request lives in one part's memory, and the fullest part is
the first to push requests out again. Tensor- and pipeline-parallel ranks work on the same requests and repeat
each other's numbers, and SGLang adds a series for each priority to the one of them all; neither is added up.
"""

import re
from collections import defaultdict
from itertools import islice

from gateway.policy.engine_load import EngineLoad

_CACHE_CONFIG = b"vllm:cache_config_info"
"""A series that is always 1; what it tells is in its labels."""
_SIGNALS = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",  # a fraction, whatever the name says
    b"vllm:gpu_cache_usage_perc": "kv_usage",  # its older name
    _CACHE_CONFIG: "kv_tokens",
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_usage",
    b"sglang:max_total_num_tokens": "kv_tokens",
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:kv_cache_usage_ratio": "kv_usage",
}

SERIES_MAX = 4096
"""A page with more of them than this is not read to its end."""
NUMBER_MAX = 1e15

# That the pattern begins with one certain byte makes the search three times as fast as `^` does.
_SERIES = re.compile(rb"\n(%b)([ \t{].*)" % b"|".join(map(re.escape, _SIGNALS)))
_ONE_PRIORITY = re.compile(rb'[{,]\s*priority="[^"]')
_REPEATING_RANKS = re.compile(rb'[{,]\s*(?:tp|pp|moe_ep)_rank="[^"]*"')
_KV_TOKENS = re.compile(rb'[{,]\s*kv_cache_size_tokens="(\d{1,15})"')
_BLOCKS = re.compile(rb'[{,]\s*num_gpu_blocks="(\d{1,15})"')
_BLOCK_TOKENS = re.compile(rb'[{,]\s*block_size="(\d{1,15})"')


def read_load(page: bytes) -> EngineLoad | None:
    """What a page in Prometheus' text format says; None when it says nothing that is known here.

    Lines that cannot be read, negative numbers, NaN and infinity count as not there.
    """
    signals: defaultdict[str, dict[bytes, float]] = defaultdict(dict)
    for series in islice(_SERIES.finditer(b"\n" + page), SERIES_MAX):
        name, rest = series.groups()
        labels, _, number = rest.rpartition(b"}")
        if _ONE_PRIORITY.search(labels):
            continue
        value = _kv_tokens(labels) if name == _CACHE_CONFIG else _number(number)
        if value is not None:
            parts = signals[_SIGNALS[name]]
            part = _REPEATING_RANKS.sub(b"", labels)
            parts[part] = max(parts.get(part, 0.0), value)
    usage = signals.get("kv_usage")
    load = EngineLoad(
        running=_total(signals.get("running")),
        waiting=_total(signals.get("waiting")),
        kv_usage=None if usage is None else min(max(usage.values()), 1.0),
        kv_tokens=_total(signals.get("kv_tokens")) or None,
    )
    return None if load == EngineLoad() else load


def _total(parts: dict[bytes, float] | None) -> int | None:
    return None if parts is None else round(sum(parts.values()))


def _number(text: bytes) -> float | None:
    """The sample's value; a time stamp may follow it."""
    try:
        value = float(text.split(None, 1)[0])
    except (ValueError, IndexError):
        return None
    return value if 0 <= value <= NUMBER_MAX else None


def _kv_tokens(labels: bytes) -> float | None:
    """The size of the KV memory. Blocks times their size is what older engines tell; where layers differ in
    kind that is not the number of tokens, so the engine's own figure comes first."""
    told = _KV_TOKENS.search(labels)
    if told is not None:
        return float(told[1])
    blocks, size = _BLOCKS.search(labels), _BLOCK_TOKENS.search(labels)
    return None if blocks is None or size is None else float(blocks[1]) * float(size[1])
