"""The gateway's case, made with real processes on the mock GPU: `qos-gateway demo`."""
