"""The engine's load and counts under vLLM's metric names, as a Prometheus text page."""

from .gpu_model import GpuEngine
from .paced_engine import EngineCounters

BLOCK_TOKENS = 16
CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")


def metrics_page(engine: GpuEngine, counters: EngineCounters, model: str) -> bytes:
    labels = f'engine="0",model_name="{model}"'
    lines: list[str] = []

    def metric(name: str, kind: str, help: str, samples: dict[str, float], labels: str = labels) -> None:
        lines.append(f"# HELP vllm:{name} {help}")
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{{{labels}{more}}} {float(value)}" for more, value in samples.items())

    running, waiting, usage = engine.running, engine.waiting, engine.kv_usage
    metric("num_requests_running", "gauge", "Number of requests in model execution batches.", {"": running})
    metric("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", {"": waiting})
    metric("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", {"": usage})
    metric("num_preemptions_total", "counter", "Number of preemptions.", {"": engine.preemptions})
    prompt, generated = counters.prompt_tokens, counters.generation_tokens
    metric("prompt_tokens_total", "counter", "Number of prefill tokens processed.", {"": prompt})
    metric("generation_tokens_total", "counter", "Number of generation tokens processed.", {"": generated})
    finished = {f',finished_reason="{reason}"': counters.finished[reason] for reason in FINISH_REASONS}
    metric("request_success_total", "counter", "Count of successfully processed requests.", dict(finished))
    rejected = {',reason="max_num_queued_reqs"': counters.queue_full, ',reason="max_num_queued_tokens"': 0}
    told = "Number of admission attempts rejected by a queue limit, by reason."
    of_server = f'model_name="{model}"'  # it is the HTTP server that rejects, in front of all engines
    metric("admission_rejections_total", "counter", told, dict(rejected), of_server)
    kv_tokens = engine.preset.kv_tokens
    memory = (
        f',block_size="{BLOCK_TOKENS}",kv_cache_size_tokens="{kv_tokens}"'
        f',num_gpu_blocks="{kv_tokens // BLOCK_TOKENS}"'
    )
    metric("cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", {memory: 1})
    return ("\n".join(lines) + "\n").encode()
