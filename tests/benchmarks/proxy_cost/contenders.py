"""Who is compared, and how each is started: the facts only."""

import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import yaml

from gateway.keys import hash_key
from tests.benchmarks.proxy_cost.engine_answers import MODEL

ROOT = Path(__file__).parents[3]
PEERS = ROOT / "build/peers"
DIRECT = "direct"
GATEWAY = "qos-gateway"


@dataclass(frozen=True)
class Setting:
    """What a contender is started with. The folder is its own."""

    folder: Path
    engine_url: str
    port: int
    second_port: int
    """For metrics, where it wants a port of its own for them."""
    key: str


@dataclass(frozen=True)
class Contender:
    name: str
    command: Callable[[Setting], Sequence[str]]
    """Writes what configuration it needs into the folder."""
    version: Callable[[], str | None]
    """None: it is not installed."""
    remarks: str
    takes_key: bool = False
    environ: Callable[[Setting], Mapping[str, str]] = field(default=lambda _: {})


def free_key() -> str:
    return "sk-" + secrets.token_hex(16)


# ---------------------------------------------------------------------- the gateway

UNLIMITED = 1_000_000_000


def gateway_settings(setting: Setting) -> dict[str, object]:
    """All of the policy at work, with room for everybody: a key whose tenant has limits, class budgets, the
    controller, slots, the lane, deadlines; but none of them is ever short, so that nothing is refused, even
    while somebody else has the machine."""
    patient = {"max_throttle_seconds": 60, "max_wait_seconds": 60}
    promised = {**patient, "slo": {"ttft_seconds": 100, "tpot_seconds": 10}}
    return {
        "server": {"port": setting.port, "operations_port": setting.second_port},
        "upstreams": [{"name": "gpu0", "url": setting.engine_url, "max_in_flight": 4096}],
        "capacity": {"tokens_per_second": UNLIMITED},
        "classes": {"P0": promised, "P1": promised, "P2": patient},
        "scheduling": {"max_pending_prefill_tokens": UNLIMITED},
        "keys_file": "keys.yaml",
        "logging": {"format": "json"},
    }


def _gateway_command(setting: Setting) -> Sequence[str]:
    entry = {
        "id": "bench",
        "sha256": hash_key(setting.key),
        "tokens_per_minute": 60 * UNLIMITED,
        "requests_per_minute": UNLIMITED,
        "max_in_flight": 4096,
    }
    config = setting.folder / "gateway.yaml"
    config.write_text(yaml.safe_dump(gateway_settings(setting)), encoding="utf-8")
    (setting.folder / "keys.yaml").write_text(yaml.safe_dump([entry]), encoding="utf-8")
    return [sys.executable, "-m", "gateway", "serve", "--config", str(config)]


# ---------------------------------------------------------------------- peers

NGINX_CONFIG = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream engine {{ server {engine}; keepalive {keepalive}; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""
NGINX_KEEPALIVE = 256


def find_nginx() -> str | None:
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def _nginx_command(setting: Setting) -> Sequence[str]:
    config = setting.folder / "nginx.conf"
    text = NGINX_CONFIG.format(
        folder=setting.folder,
        engine=setting.engine_url.removeprefix("http://"),
        port=setting.port,
        keepalive=NGINX_KEEPALIVE,
    )
    config.write_text(text, encoding="utf-8")
    return [find_nginx() or "nginx", "-c", str(config), "-p", str(setting.folder), "-e", "stderr"]


def _nginx_version() -> str | None:
    nginx = find_nginx()
    if nginx is None:
        return None
    said = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=False).stderr
    return said.rpartition("/")[2].split()[0]


def peer_python(name: str) -> Path:
    return PEERS / name / "bin/python"


def _peer_version(name: str) -> Callable[[], str | None]:
    def ask() -> str | None:
        python = peer_python(name)
        if not python.exists():
            return None
        question = f"from importlib.metadata import version; print(version({name!r}))"
        asked = subprocess.run([python, "-c", question], capture_output=True, text=True, check=False)
        return asked.stdout.strip() or None

    return ask


def _router_options(setting: Setting) -> list[str]:
    return [
        *("--host", "127.0.0.1", "--port", str(setting.port)),
        *("--worker-urls", setting.engine_url, "--policy", "round_robin"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(setting.second_port)),
    ]


def _vllm_router_command(setting: Setting) -> Sequence[str]:
    return [str(PEERS / "vllm-router/bin/vllm-router"), *_router_options(setting)]


def _sglang_router_command(setting: Setting) -> Sequence[str]:
    python = str(peer_python("sglang-router"))
    return [python, "-m", "sglang_router.launch_router", *_router_options(setting)]


def _litellm_command(setting: Setting) -> Sequence[str]:
    engine = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{setting.engine_url}/v1", "api_key": "none"}
    config = setting.folder / "litellm.yaml"
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": engine}]}))
    return [
        *(str(PEERS / "litellm/bin/litellm"), "--config", str(config)),
        *("--host", "127.0.0.1", "--port", str(setting.port), "--telemetry", "False"),
    ]


CONTENDERS = (
    Contender(
        GATEWAY,
        _gateway_command,
        lambda: version("qos-gateway"),
        "full policy, one key with tenant limits, metrics, request log (JSON, to a file)",
        takes_key=True,
    ),
    Contender(
        "nginx",
        _nginx_command,
        _nginx_version,
        f"one worker, proxy_buffering off, keepalive {NGINX_KEEPALIVE}, no access log",
    ),
    Contender(
        "vllm-router",
        _vllm_router_command,
        _peer_version("vllm-router"),
        "round_robin, metrics on, its own default log",
    ),
    Contender(
        "sglang-router",
        _sglang_router_command,
        _peer_version("sglang-router"),
        "round_robin, metrics on, its own default log",
    ),
    Contender(
        "litellm",
        _litellm_command,
        _peer_version("litellm"),
        "one worker, a master key, no database, its own default log",
        takes_key=True,
        environ=lambda setting: {
            "LITELLM_MASTER_KEY": setting.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
)
