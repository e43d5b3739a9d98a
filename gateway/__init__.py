"""A QoS gateway in front of OpenAI-compatible inference engines."""

__version__ = "0.1.0"
