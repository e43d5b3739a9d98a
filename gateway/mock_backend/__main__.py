"""`python -m gateway.mock_backend --preset seed_32k --port 8100`: the mock GPU as a process of its own."""

import argparse
import asyncio
import logging
import sys
import threading

from .child import MockGpuError, MockGpuProcess
from .faults import FaultOptions, kinds_help, parse_table
from .gpu_model import PRESETS
from .server import exit_at_end_of_stdin, serve_mock_gpu
from .supervisor import serve_restarted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gateway.mock_backend",
        description="A stand-in for vLLM with the timing of a real GPU.",
        epilog="faults, and the defaults of their parameters:\n  " + "\n  ".join(kinds_help()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", default="seed_32k", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100, help="0 takes any free port")
    parser.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in a batch")
    parser.add_argument(
        "--max-num-queued-reqs", type=int, metavar="N", help="sequences waiting and running; more get a 503"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND=PROBABILITY",
        help='as in "silence=0.01; after=3"',
    )
    parser.add_argument("--fault-seed", type=int, metavar="N", help="the same seed, the same faults")
    parser.add_argument(
        "--allow-faults", action="store_true", help="let requests name their fault, and serve /faults"
    )
    parser.add_argument(
        "--restart-after", type=float, metavar="SECONDS", help="start again so long after a crash"
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin is closed")
    asked = parser.parse_args(arguments)
    try:
        faults = FaultOptions(parse_table(asked.fault), asked.fault_seed, asked.allow_faults)
        if asked.restart_after is None:
            _serve(asked, faults)
        elif asked.restart_after >= 0:
            asyncio.run(_supervise(asked, faults))
        else:
            raise ValueError(f"--restart-after must be at least 0, not {asked.restart_after:g}")
    except ValueError as error:
        parser.error(str(error))
    except MockGpuError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"cannot listen on {asked.host}:{asked.port}: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(asked: argparse.Namespace, faults: FaultOptions) -> None:
    serve_mock_gpu(
        asked.preset,
        asked.host,
        asked.port,
        policy=asked.policy,
        max_num_seqs=asked.max_num_seqs,
        max_num_queued_reqs=asked.max_num_queued_reqs,
        faults=faults,
        exit_with_parent=asked.exit_with_parent,
    )


async def _supervise(asked: argparse.Namespace, faults: FaultOptions) -> None:
    async def start(port: int) -> MockGpuProcess:
        return await MockGpuProcess.start(
            asked.preset,
            policy=asked.policy,
            max_num_seqs=asked.max_num_seqs,
            max_num_queued_reqs=asked.max_num_queued_reqs,
            faults=faults,
            host=asked.host,
            port=port,
        )

    logging.basicConfig(format="%(message)s")
    if asked.exit_with_parent:
        threading.Thread(target=exit_at_end_of_stdin, daemon=True).start()
    await serve_restarted(start, asked.port, asked.preset, asked.restart_after)


if __name__ == "__main__":
    sys.exit(main())
