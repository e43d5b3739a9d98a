"""`python -m gateway.mock_backend --preset seed_32k --port 8100`: the mock GPU as a process of its own."""

import argparse
import sys

from .gpu_model import PRESETS
from .server import serve_mock_gpu


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gateway.mock_backend",
        description="A stand-in for vLLM with the timing of a real GPU.",
    )
    parser.add_argument("--preset", default="seed_32k", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes any free port")
    parser.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a batch")
    parser.add_argument(
        "--max-num-queued-reqs", type=int, metavar="N", help="sequences waiting and running; more get a 503"
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin is closed")
    asked = parser.parse_args(arguments)
    try:
        serve_mock_gpu(
            asked.preset,
            asked.host,
            asked.port,
            policy=asked.policy,
            max_num_seqs=asked.max_num_seqs,
            max_num_queued_reqs=asked.max_num_queued_reqs,
            exit_with_parent=asked.exit_with_parent,
        )
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"cannot listen on {asked.host}:{asked.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
