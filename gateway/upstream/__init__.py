"""Talking to inference engines: the data path, the stream reader, probes."""
