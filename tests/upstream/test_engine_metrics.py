"""Excerpts of engines' metrics pages, and what they say."""

import pytest

from gateway.policy.engine_load import EngineLoad
from gateway.upstream.engine_metrics import NUMBER_MAX, read_load

VLLM = b"""\
# HELP process_open_fds Number of open file descriptors.
# TYPE process_open_fds gauge
process_open_fds 52.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 8.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 8.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="deferred"} 0.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.78125
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="tiny"} 118.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",engine="0",\
hash_block_size="None",kv_cache_size_tokens="1048576",mamba_block_size="None",num_cpu_blocks="None",\
num_gpu_blocks="8192",num_gpu_blocks_override="None",user_specified_block_size="False"} 1.0
"""

OLDER_VLLM = b"""\
vllm:num_requests_running{model_name="m"} 5.0
vllm:num_requests_swapped{model_name="m"} 7.0
vllm:num_requests_waiting{model_name="m"} 12.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.35
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
vllm:cache_config_info{block_size="16",num_cpu_blocks="1024",num_gpu_blocks="573"} 1.0
"""

SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 162.0
sglang:num_used_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 123859.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2826.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 442353.0
"""

LLAMACPP = b"""\
# HELP llamacpp:tokens_predicted_total Number of generation tokens processed
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 94
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# HELP llamacpp:requests_deferred Number of requests deferred
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 4
"""


@pytest.mark.parametrize(
    ("page", "load"),
    [
        pytest.param(VLLM, EngineLoad(4, 8, 0.78125, 1048576), id="vllm"),
        pytest.param(OLDER_VLLM, EngineLoad(5, 12, 0.35, 573 * 16), id="older-vllm"),
        pytest.param(SGLANG, EngineLoad(162, 2826, 0.28, 442353), id="sglang"),
        pytest.param(LLAMACPP, EngineLoad(2, 4), id="llamacpp"),
        pytest.param(
            LLAMACPP + b"llamacpp:kv_cache_usage_ratio 0.63\n", EngineLoad(2, 4, 0.63), id="older-llamacpp"
        ),
    ],
)
def test_each_engines_names(page: bytes, load: EngineLoad) -> None:
    """The load is found under every engine's own names, whichever way the lines end."""
    assert read_load(page) == load
    assert read_load(page.replace(b"\n", b"\r\n")) == load
    assert read_load(page.rstrip(b"\n")) == load


@pytest.mark.parametrize(
    ("page", "load"),
    [
        (b"vllm:num_requests_waiting 3", EngineLoad(waiting=3)),
        (b"vllm:num_requests_waiting\t3\n", EngineLoad(waiting=3)),
        (b"vllm:num_requests_waiting{} 3\n", EngineLoad(waiting=3)),
        (b'vllm:num_requests_waiting{engine="0"}3\n', EngineLoad(waiting=3)),
        (b'vllm:num_requests_waiting{engine="0"} 3.0 1700000000000\n', EngineLoad(waiting=3)),
        (b'vllm:num_requests_waiting{model_name="a} 7 b{",engine="0"} 3\n', EngineLoad(waiting=3)),
        (b'vllm:num_requests_waiting{model_name="\\"} 7"} 3e0\n', EngineLoad(waiting=3)),
        (b"vllm:num_requests_running 2\n", EngineLoad(running=2)),
        (b"sglang:token_usage 0.5\n", EngineLoad(kv_usage=0.5)),
        (b"sglang:token_usage 1.02\n", EngineLoad(kv_usage=1.0)),
        (b"sglang:max_total_num_tokens 100\n", EngineLoad(kv_tokens=100)),
    ],
)
def test_a_single_line(page: bytes, load: EngineLoad) -> None:
    """What a page does not have is None; labels, time stamps and white space do not disturb."""
    assert read_load(page) == load


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n\n\n",
        b"<!DOCTYPE html><html><body>vllm:num_requests_waiting 3</body></html>",
        b'{"detail":"Not Found"}',
        b"# TYPE vllm:num_requests_waiting gauge\n",
        b" vllm:num_requests_waiting 3\n",
        b"vllm:num_requests_waiting_by_reason 3\n",
        b"other_vllm:num_requests_waiting 3\n",
        b"vllm:num_requests_waiting\n",
        b"vllm:num_requests_waiting \n",
        b"vllm:num_requests_waiting{} \n",
        b"vllm:num_requests_waiting three\n",
        b'vllm:num_requests_waiting{engine="0" 3\n',
        b"vllm:num_requests_waiting NaN\n",
        b"vllm:num_requests_waiting +Inf\n",
        b"vllm:num_requests_waiting -1\n",
        b"vllm:num_requests_waiting 1e300\n",
        b"vllm:num_requests_waiting \xff\xfe\n",
        b"vllm:cache_config_info 1.0\n",
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n',
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="0"} 1.0\n',
        b'vllm:cache_config_info{mamba_block_size="16",num_gpu_blocks_override="100"} 1.0\n',
        bytes(range(256)) * 100,
    ],
)
def test_nothing_that_can_be_read(page: bytes) -> None:
    """A page that says nothing that is known, or not in numbers that make sense, is no load."""
    assert read_load(page) is None


def test_a_bad_line_does_not_spoil_the_others() -> None:
    page = VLLM.replace(b"} 8.0", b"} NaN") + b"vllm:num_requests_running{\n"
    assert read_load(page) == EngineLoad(4, None, 0.78125, 1048576)


def test_the_parts_of_an_engine() -> None:
    """Requests and KV memory of data-parallel ranks and models add up; the fullest memory counts."""
    page = b"""\
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 6.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.95
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="110"} 1.0
"""
    assert read_load(page) == EngineLoad(10, 5, 0.95, 3360)


def test_ranks_that_work_on_the_same_requests() -> None:
    """Tensor- and pipeline-parallel ranks that each report their scheduler are not added up."""
    series = [
        b'sglang:%b{model_name="m",dp_rank="%d",moe_ep_rank="%d",pp_rank="0",tp_rank="%d"} %d\n'
        % (name, rank // 2, rank, rank, value + rank // 2)
        for rank in range(4)
        for name, value in ((b"num_running_reqs", 10), (b"num_queue_reqs", 0), (b"max_total_num_tokens", 500))
    ]
    assert read_load(b"".join(series)) == EngineLoad(21, 1, None, 1001)


def test_series_for_each_priority() -> None:
    """Where SGLang schedules by priority it tells the total, and each priority beside it."""
    page = b"""\
sglang:num_running_reqs{model_name="m",priority=""} 5.0
sglang:num_running_reqs{model_name="m",priority="10"} 2.0
sglang:num_running_reqs{model_name="m",priority="None"} 3.0
sglang:num_queue_reqs{priority="",model_name="m"} 7.0
sglang:num_queue_reqs{priority="10",model_name="m"} 7.0
sglang:max_total_num_tokens{model_name="m",priority=""} 500.0
"""
    assert read_load(page) == EngineLoad(5, 7, None, 500)


def test_the_engines_own_figure_of_its_kv_memory() -> None:
    """Where layers are of several kinds, blocks times their size is not the number of tokens."""
    page = (
        b'vllm:cache_config_info{block_size="8",kv_cache_size_tokens="463459",num_gpu_blocks="320"} 1.0\n'
        b"vllm:num_requests_waiting 0.0\n"
    )
    assert read_load(page) == EngineLoad(waiting=0, kv_tokens=463459)
    assert read_load(page.replace(b'"463459"', b'"None"')) == EngineLoad(waiting=0, kv_tokens=2560)


def test_numbers_stay_within_bounds() -> None:
    """However large the numbers and however many the series, what is told can be reckoned with."""
    page = b"".join(b'vllm:num_requests_waiting{engine="%d"} 1e15\n' % n for n in range(10_000))
    load = read_load(page)
    assert load is not None
    assert load.waiting is not None
    assert NUMBER_MAX < load.waiting < 1e4 * NUMBER_MAX
