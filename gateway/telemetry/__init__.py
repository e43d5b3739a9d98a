"""Listeners to policy events: metrics and the request log."""
