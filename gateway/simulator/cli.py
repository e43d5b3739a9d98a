"""The options of `qos-gateway simulate`. Nothing heavy is imported before they have been read."""

from pathlib import Path
from typing import Annotated

import typer

from gateway.mock_backend.gpu_model import PRESETS

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

_EXAMPLES = (
    ("A first look: 12 requests/s for five minutes, against the defaults and against no gateway:",),
    ("$ qos-gateway simulate --preset a100_llama3_8b --straight",),
    ("Two configurations side by side on a trace twice as fast, five seeds, files into out/:",),
    (
        "$ qos-gateway simulate --config a.yaml --config b.yaml --trace trace.csv --scale 2",
        "--preset a100_llama3_8b --seeds 5 --out out",
    ),
    ("What if: the arrivals of a decision log under another configuration:",),
    ("$ qos-gateway simulate --config new.yaml --decision-log decisions.jsonl --preset h100_llama3_8b",),
    ("Bursts, and clients that retry as the OpenAI SDKs do:",),
    ("$ qos-gateway simulate --rate 20 --burstiness 3 --retries 2 --mix 20/50/30 --preset h100_llama3_8b",),
    ("200 clients that ask, wait for the answer, think two seconds, and ask again:",),
    ("$ qos-gateway simulate --clients 200 --think 2 --seconds 600",),
)
EPILOG = "\n\n".join(" ".join(words) for words in _EXAMPLES)


def simulate(
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", metavar="FILE", help="YAML settings; repeat it to compare several."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Arrivals: columns arrival_s, input_tokens, output_tokens."),
    ] = None,
    decision_log: Annotated[
        Path | None,
        typer.Option(metavar="JSONL", help="Arrivals: those a gateway logged, with their classes."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals: so many a second. Without any of the three, 12.")
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(help="Of --rate: deviation of the gaps over their mean. 1 is Poisson, more Gamma."),
    ] = 1.0,
    lengths: Annotated[
        Path | None, typer.Option(metavar="CSV", help="Draw lengths from this trace, not from conversations.")
    ] = None,
    clients: Annotated[int, typer.Option(help="So many clients that wait for each answer, in addition.")] = 0,
    think: Annotated[float, typer.Option(help="Seconds that --clients pause after an answer.")] = 1.0,
    mix: Annotated[
        str | None, typer.Option(metavar="P0/P1/P2", help="Parts of the classes; without it 30/45/25.")
    ] = None,
    classes_by: Annotated[
        str,
        typer.Option(
            metavar="WAY",
            help="Classes of a trace: column (class), tenant (one class each, by --mix), length (long "
            "prompts are P2), mix (drawn); auto: the column if there, else the mix.",
        ),
    ] = "auto",
    scale: Annotated[float, typer.Option(help="Requests come so many times as fast.")] = 1.0,
    retries: Annotated[
        int | None,
        typer.Option(
            help="Refused requests come back so often, as with the OpenAI SDKs; without it --clients do "
            "twice, others never."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Requests arrive for so long; without it the whole trace or log, else 300."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help=f"GPU of all upstreams: {', '.join(PRESETS)}. Not needed where their urls are mock://…"
        ),
    ] = None,
    straight: Annotated[
        bool, typer.Option("--straight", help="Also the same engines without a gateway.")
    ] = False,
    seeds: Annotated[
        int, typer.Option(help="Runs of each configuration; the table shows mean ± spread.")
    ] = 1,
    seed: Annotated[int, typer.Option(help="The first of them. The same seed, the same report.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write report, history and latencies there: CSV, JSON, PNG."),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Pictures in --out; they need qos-gateway\\[plots].")
    ] = True,
    processes: Annotated[
        int | None, typer.Option(help="Runs at a time; without it one for each core.")
    ] = None,
) -> None:
    """Try configurations on virtual time: the real policy, a model of the GPU, hours of traffic in seconds.

    Shows for each class how many requests were served as promised, of those admitted and of all, first token,
    time per token and largest gap, goodput and refusals.
    """
    from gateway.simulator.command import Asked, Mistake
    from gateway.simulator.command import simulate as run

    asked = Asked(
        configs=tuple(config or ()),
        trace=trace,
        decision_log=decision_log,
        rate=rate,
        burstiness=burstiness,
        lengths=lengths,
        clients=clients,
        think=think,
        mix=mix,
        classes_by=classes_by,
        scale=scale,
        retries=retries,
        seconds=seconds,
        preset=preset,
        straight=straight,
        seeds=seeds,
        seed=seed,
        out=out,
        plots=plots,
        processes=processes,
    )
    try:
        run(asked)
    except Mistake as mistake:
        typer.echo(str(mistake), err=True)
        raise typer.Exit(EXIT_MISTAKE) from None
    except OSError as error:
        typer.echo(f"{error.filename}: {error.strerror or error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
