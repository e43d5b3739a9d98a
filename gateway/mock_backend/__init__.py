"""A stand-in for vLLM with the timing of a real GPU."""
