"""The command line: `qos-gateway serve` and its small helpers."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gateway import __version__
from gateway.mock_backend.gpu_model import PRESETS

if TYPE_CHECKING:
    from gateway.api.tokenizer_files import TokenizerFile
    from gateway.keys import KeyRing
    from gateway.settings import Settings

cli = typer.Typer(
    name="qos-gateway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Priority classes, token budgets and latency promises in front of OpenAI-compatible engines.",
)

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="YAML settings; without one the defaults: an embedded mock GPU and no keys.",
    ),
]

EXIT_CONFIG = 2
EXIT_PORT = 3
EXIT_ENGINE = 4


@cli.command()
def serve(config: ConfigOption = None) -> None:
    """Run the gateway: tenants on port 8000, operators (metrics) on port 8001.

    Every setting can be overridden from the environment, as in QOS_SERVER__PORT=9000. Ctrl-C or SIGTERM
    lets running streams end first; a second one ends at once.
    """
    import uvloop

    from gateway.api.tokenizer_files import load_tokenizers
    from gateway.config_reading import ConfigError
    from gateway.keys import load_keys
    from gateway.settings import load_settings

    try:
        settings = load_settings(config)
        keys = None if settings.keys_file is None else load_keys(settings.keys_file)
        tokenizers = load_tokenizers(settings.tokenizers, config)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    uvloop.run(_serve(settings, keys, tokenizers))


async def _serve(
    settings: "Settings", keys: "KeyRing | None", tokenizers: "Mapping[str, TokenizerFile]"
) -> None:
    """Mock GPUs come up while the rest of the gateway is still being imported, which takes as long."""
    import asyncio

    from gateway.mock_backend.child import MockGpuError, MockGpus

    mock_gpus = MockGpus({upstream.name: upstream.url for upstream in settings.upstreams})
    await asyncio.sleep(0)

    from gateway.api.app import Gateway
    from gateway.config_reading import ConfigError
    from gateway.server import CannotListen, quiet_uvicorn, serve
    from gateway.telemetry.log_setup import configure_logging

    configure_logging(settings.logging.level, settings.logging.format)
    quiet_uvicorn()
    try:
        await serve(Gateway(settings, keys, tokenizers=tokenizers, mock_gpus=mock_gpus))
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except CannotListen as error:
        _fail(str(error), EXIT_PORT)
    except MockGpuError as error:
        _fail(str(error), EXIT_ENGINE)


@cli.command("mock-gpu")
def mock_gpu(
    preset: Annotated[
        str, typer.Option(help=f"Which GPU and model to imitate: {', '.join(PRESETS)}.")
    ] = "seed_32k",
    port: Annotated[int, typer.Option(help="0 takes any free port.")] = 8100,
    host: str = "127.0.0.1",
    policy: Annotated[str, typer.Option(help="Queue order of the engine: fcfs or priority.")] = "fcfs",
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a batch.")] = None,
    max_num_queued_reqs: Annotated[
        int | None, typer.Option(help="Sequences waiting and running; what comes beyond gets a 503.")
    ] = None,
) -> None:
    """Run a stand-in for vLLM with the timing of a real GPU: OpenAI API, /health, /metrics."""
    from gateway.mock_backend.__main__ import main as run

    arguments = ["--preset", preset, "--port", str(port), "--host", host, "--policy", policy]
    if max_num_seqs is not None:
        arguments += ["--max-num-seqs", str(max_num_seqs)]
    if max_num_queued_reqs is not None:
        arguments += ["--max-num-queued-reqs", str(max_num_queued_reqs)]
    raise typer.Exit(run(arguments))


@cli.command("check-config")
def check_config(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="YAML settings to check.")],
) -> None:
    """Check a configuration, the files it names and QOS_… variables, and say what is wrong with them."""
    from gateway.api.tokenizer_files import load_tokenizers
    from gateway.config_reading import ConfigError
    from gateway.keys import load_keys
    from gateway.settings import load_settings

    try:
        settings = load_settings(config)
        keys = None if settings.keys_file is None else load_keys(settings.keys_file)
        load_tokenizers(settings.tokenizers, config)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    engines = ", ".join(f"{upstream.name} ({upstream.url})" for upstream in settings.upstreams)
    door = "open to all, no keys" if keys is None else f"{len(keys)} keys"
    typer.echo(f"{config}: good. Engines: {engines}. {door[0].upper()}{door[1:]}.")


@cli.command("hash-key")
def hash_key(
    key: Annotated[str | None, typer.Argument(help="The key; left out, it is asked for.")] = None,
) -> None:
    """Print the SHA-256 of an API key, for the keys file."""
    from gateway.keys import hash_key as digest

    if key is None:
        if sys.stdin.isatty():
            key = typer.prompt("Key", hide_input=True)
        else:
            key = sys.stdin.readline().rstrip("\n")
    if not key:
        _fail("an empty key is no key", EXIT_CONFIG)
    typer.echo(digest(key))


@cli.command()
def healthcheck(
    config: ConfigOption = None,
    ready: Annotated[bool, typer.Option("--ready", help="Ask /readyz instead of /healthz.")] = False,
    seconds: Annotated[float, typer.Option(help="How long to wait for an answer.")] = 3.0,
) -> None:
    """Ask the gateway that this configuration describes whether it lives; exit status 0 means yes."""
    import httpx

    from gateway.config_reading import ConfigError
    from gateway.settings import load_settings

    try:
        server = load_settings(config).server
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{server.port}/{'readyz' if ready else 'healthz'}"
    try:
        answer = httpx.get(url, timeout=seconds, trust_env=False)
    except httpx.HTTPError as error:
        _fail(f"{url}: {error}", 1)
    if answer.status_code != 200:
        _fail(f"{url}: {answer.status_code}", 1)
    typer.echo(f"{url}: ok")


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
