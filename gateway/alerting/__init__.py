"""Prometheus' rules for a gateway, made from its configuration."""
