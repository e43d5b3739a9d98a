"""The gateway's own command line in a process that says on SIGUSR1 how many asyncio tasks it has:
`python -m tests.soak.watched_gateway serve …`"""

import asyncio
import json
import os
import signal
from types import FrameType

from gateway.__main__ import main


def tell(signal_number: int, frame: FrameType | None) -> None:
    line = {"event": "tasks", "tasks": len(asyncio.all_tasks())}
    os.write(2, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, tell)
    main()
