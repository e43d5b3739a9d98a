"""Grafana's dashboards of the gateway: made from Python, `python -m grafana.generate`."""
