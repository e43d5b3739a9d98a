"""The policy on real time, driven by asyncio."""
