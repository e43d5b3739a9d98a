"""The command line: `qos-gateway serve` and its small helpers."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from gateway import __version__
from gateway.mock_backend.faults import kinds_help
from gateway.mock_backend.gpu_model import PRESETS
from gateway.simulator import cli as simulator

if TYPE_CHECKING:
    from gateway.api.configuration import Configuration

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
EXIT_INTERRUPTED = 130


@cli.command()
def serve(config: ConfigOption = None) -> None:
    """Run the gateway: tenants on port 8000, operators (metrics) on port 8001.

    Every setting can be overridden from the environment, as in QOS_SERVER__PORT=9000. Ctrl-C or SIGTERM
    lets running streams end first; a second one ends at once. SIGHUP reads the configuration again.
    """
    _start_lean()
    import uvloop

    configuration = _read(config)
    uvloop.run(_serve(configuration, partial(_read_again, config)))


def _start_lean() -> None:
    """What starting takes is imports, which make many objects and no garbage: nothing is collected before all
    of them are there, and then nothing of them looked at again (`_collect_again`). pydantic's plugins cost a
    search through everything installed; `PYDANTIC_DISABLE_PLUGINS=` (empty) lets them in."""
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")


def _collect_again() -> None:
    """Requests leave no garbage in cycles (they take apart what holds each other), connections little: so it
    is looked for seldom."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


async def _serve(configuration: "Configuration", read: "Callable[[], Configuration]") -> None:
    """Mock GPUs come up while the rest of the gateway is still being imported, which takes as long."""
    import asyncio

    from gateway.mock_backend.child import MockGpuError, MockGpus

    settings = configuration.settings
    mock_gpus = MockGpus({upstream.name: upstream.url for upstream in settings.upstreams})
    await asyncio.sleep(0)

    with _absent("rich"):
        import httpx  # noqa: F401
        import structlog  # noqa: F401
    from gateway.api.app import Gateway
    from gateway.config_reading import ConfigError
    from gateway.server import CannotListen, quiet_uvicorn, serve
    from gateway.telemetry.log_setup import configure_logging

    configure_logging(settings.logging.level, settings.logging.format)
    quiet_uvicorn()
    try:
        await serve(Gateway(configuration, read=read, mock_gpus=mock_gpus), _collect_again)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)
    except CannotListen as error:
        _fail(str(error), EXIT_PORT)
    except MockGpuError as error:
        _fail(str(error), EXIT_ENGINE)


@contextmanager
def _absent(package: str) -> Iterator[None]:
    """Imports inside the block do not find the package, which is one that they can do without: a fancier
    traceback, a command line of their own."""
    present = sys.modules.get(package)
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[package]
        if present is not None:
            sys.modules[package] = present


@cli.command("mock-gpu", epilog="\n\n".join(["Faults, and the defaults of their parameters:", *kinds_help()]))
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
    fault: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=PROBABILITY",
            help='What goes wrong with how many requests, as in "silence=0.01; after=3"; can be repeated.',
        ),
    ] = None,
    fault_seed: Annotated[int | None, typer.Option(help="The same seed, the same faults.")] = None,
    allow_faults: Annotated[
        bool,
        typer.Option(
            "--allow-faults",
            help='Let a request name its fault in a header, "x-mock-fault: silence; after=3", and '
            "let the table be read, replaced and emptied by GET, POST and DELETE /faults.",
        ),
    ] = False,
    restart_after: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start again so long after a crash.")
    ] = None,
) -> None:
    """Run a stand-in for vLLM with the timing of a real GPU: OpenAI API, /health, /metrics."""
    from gateway.mock_backend.__main__ import main as run

    arguments = ["--preset", preset, "--port", str(port), "--host", host, "--policy", policy]
    if max_num_seqs is not None:
        arguments += ["--max-num-seqs", str(max_num_seqs)]
    if max_num_queued_reqs is not None:
        arguments += ["--max-num-queued-reqs", str(max_num_queued_reqs)]
    for each in fault or ():
        arguments += ["--fault", each]
    if fault_seed is not None:
        arguments += ["--fault-seed", str(fault_seed)]
    if allow_faults:
        arguments += ["--allow-faults"]
    if restart_after is not None:
        arguments += ["--restart-after", str(restart_after)]
    raise typer.Exit(run(arguments))


@cli.command("check-config")
def check_config(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="YAML settings to check.")],
) -> None:
    """Check a configuration, the files it names and QOS_… variables, and say what is wrong with them."""
    configuration = _read(config)
    settings, keys = configuration.settings, configuration.keys
    engines = ", ".join(f"{upstream.name} ({upstream.url})" for upstream in settings.upstreams)
    door = "open to all, no keys" if keys is None else f"{len(keys)} keys"
    typer.echo(f"{config}: good. Engines: {engines}. {door[0].upper()}{door[1:]}.")


@cli.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="Of each half.")] = 20.0,
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 1,
) -> None:
    """Show in a minute what the classes change: the same load without the gateway, then with it.

    Real processes on a mock GPU and free ports of this machine; nothing needs to run and nothing stays.
    """
    import asyncio

    import uvloop
    from rich.console import Console

    from gateway.demo.command import run_demo
    from gateway.mock_backend.child import MockGpuError

    try:
        uvloop.run(run_demo(seconds, seed, Console()))
    except (MockGpuError, RuntimeError) as error:
        _fail(str(error), EXIT_ENGINE)
    except (KeyboardInterrupt, asyncio.CancelledError):
        _fail("stopped", EXIT_INTERRUPTED)


@cli.command()
def calibrate(
    url: Annotated[str, typer.Option(help="The engine, as in http://engine:8000.", show_default=False)],
    model: Annotated[str | None, typer.Option(help="Needed if it serves several.")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VAR", help="Environment variable with the engine's API key.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="No longer than this.")] = 60.0,
    tokens: Annotated[int, typer.Option(min=1000, help="No more than this, prompts and answers.")] = 500_000,
    tpot_seconds: Annotated[
        float, typer.Option(min=0.001, help="Target of time per output token, as in classes.P0.slo.")
    ] = 0.06,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the YAML there; else to standard output.")
    ] = None,
) -> None:
    """Measure an engine and suggest tokens_per_second, output_weight and max_in_flight for it, as YAML.

    Sends it prompts of several lengths, then more and more requests at once until that does not pay.
    """
    import uvloop

    from gateway.calibration.command import calibrate as measure
    from gateway.calibration.command import warning
    from gateway.calibration.engine import EngineProblem
    from gateway.calibration.probes import Bounds

    bounds = Bounds(seconds, tokens)
    api_key = _from_environment(api_key_env)
    if out is not None and not out.parent.is_dir():
        _fail(f"{out}: there is no such folder", EXIT_CONFIG)
    if not yes:
        if not sys.stdin.isatty():
            _fail(f"{warning(url, bounds)} Say --yes if that is wanted.", EXIT_CONFIG)
        typer.echo(warning(url, bounds), err=True)
        typer.confirm("Go on?", abort=True, err=True)
    try:
        suggested = uvloop.run(measure(url, model, api_key, bounds, tpot_seconds))
        if out is None:
            typer.echo(suggested, nl=False)
        else:
            out.write_text(suggested, encoding="utf-8")
    except EngineProblem as error:
        _fail(str(error), EXIT_ENGINE)
    except (ValueError, OSError) as error:
        _fail(str(error), EXIT_CONFIG)
    except KeyboardInterrupt:
        _fail("stopped", EXIT_INTERRUPTED)


cli.command("simulate", epilog=simulator.EPILOG)(simulator.simulate)


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
def rules(
    config: ConfigOption = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write qos-gateway.yml there; else to standard output."),
    ] = None,
    job: Annotated[str, typer.Option(help="Prometheus' job that scrapes the gateways.")] = "qos-gateway",
    runbook: Annotated[
        str, typer.Option(metavar="URL", help="Page with a section for each alert, which alerts link to.")
    ] = "config/prometheus/RUNBOOK.md",
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if FOLDER has other rules.")
    ] = False,
) -> None:
    """Make Prometheus' recording and alert rules for the promises of this configuration."""
    from gateway.alerting.command import FILE_NAME, is_current, rules_text, write
    from gateway.config_reading import ConfigError
    from gateway.settings import load_settings

    try:
        text = rules_text(load_settings(config), job, runbook)
    except (ConfigError, ValueError) as error:
        _fail(str(error), EXIT_CONFIG)
    if out is None:
        if check:
            _fail("--check needs --out", EXIT_CONFIG)
        typer.echo(text, nl=False)
    elif check:
        if not is_current(out, text):
            _fail(f"{out / FILE_NAME}: other rules than this configuration makes", 1)
    else:
        try:
            typer.echo(str(write(out, text)))
        except OSError as error:
            _fail(str(error), EXIT_CONFIG)


@cli.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _read(path: Path | None) -> "Configuration":
    """The configuration, or the end with a word on what is wrong with it."""
    from gateway.config_reading import ConfigError

    try:
        return _read_again(path)
    except ConfigError as error:
        _fail(str(error), EXIT_CONFIG)


def _read_again(path: Path | None) -> "Configuration":
    from gateway.api.configuration import read_configuration

    return read_configuration(path)


def _from_environment(name: str | None) -> str | None:
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        _fail(f"the environment has no {name}", EXIT_CONFIG)
    if not all("!" <= character <= "~" for character in value):
        _fail(f"{name} holds more than visible ASCII text", EXIT_CONFIG)
    return value


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
