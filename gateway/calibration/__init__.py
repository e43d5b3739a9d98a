"""Measures an engine and suggests what to configure for it: `qos-gateway calibrate`."""
