"""How far off the estimates of input tokens are, on prose, on code, on Chinese and on a mix of them.

    make estimate-error
    make estimate-error ARGS="--tokenizer path/to/tokenizer.json --chinese page.txt"

Each row is a fresh model that answers 200 chat requests with what the tokenizer counts (and a chat template
around it); then the relative errors of the next forecasts are taken. Without a tokenizer one is trained on
half of the texts. The texts are those of the tests; the Chinese is one page, so one's own text says more.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import typer
from tokenizers import Tokenizer

from gateway.api.body import peek
from gateway.policy.input_estimator import InputEstimator
from tests.support import sample_texts
from tests.support.sample_texts import KINDS, Prompts

FORECASTS = 200
FIRST = 20


def errors(prompts: Prompts, answers: int) -> tuple[list[float], float]:
    """Relative errors, in order, of the forecasts before and after so many answers; and bytes to a token."""
    estimator = InputEstimator()
    found = []
    text_bytes = text_tokens = 0
    for number in range(answers + FORECASTS):
        body, tokens = prompts.next()
        facts = peek(json.dumps(body).encode(), "chat")
        found.append(abs(estimator.estimate("m", facts.text) / tokens - 1))
        text_bytes += facts.text_bytes
        text_tokens += tokens
        if number < answers:
            estimator.learn("m", facts.text, tokens)
    return found, text_bytes / text_tokens


def main(
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer.json.")] = None,
    chinese: Annotated[Path | None, typer.Option(help="Chinese text, in paragraphs.")] = None,
    answers: Annotated[int, typer.Option(help="How many the estimate may learn from.")] = 200,
    seed: int = 1,
) -> None:
    if chinese is not None:
        sample_texts.CHINESE = chinese
    counting = None if tokenizer is None else Tokenizer.from_file(str(tokenizer))
    name = "one trained on the other half" if tokenizer is None else tokenizer.name
    print(f"Median relative error of the input estimate (tokenizer: {name})")
    print(
        f"{'':>10} {'bytes/token':>12} {f'first {FIRST}':>9} {f'after {answers}':>10} {'9 of 10 within':>15}"
    )
    for kinds in (*((kind,) for kind in KINDS), KINDS):
        found, ratio = errors(Prompts(*kinds, seed=seed, tokenizer=counting), answers)
        first, last = found[:FIRST], found[answers:]
        print(
            f"{kinds[0] if len(kinds) == 1 else 'mix':>10} {ratio:>12.2f} {statistics.median(first):>9.1%} "
            f"{statistics.median(last):>10.1%} {statistics.quantiles(last, n=10)[8]:>15.1%}"
        )


if __name__ == "__main__":
    typer.run(main)
