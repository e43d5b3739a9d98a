"""A mock GPU that is started again when it has crashed, as a process of its own (`--restart-after`)."""

import asyncio
import signal

from .child import RestartedMockGpu, Start


async def serve_restarted(start: Start, port: int, preset: str, after_seconds: float) -> None:
    """Until SIGTERM or SIGINT, with the ready line of a mock GPU. Raises MockGpuError."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    gpu = await RestartedMockGpu.start(start, after_seconds, port)
    print(f"ready {gpu.url} preset={preset}", flush=True)
    try:
        await stopped.wait()
    finally:
        await gpu.stop()
