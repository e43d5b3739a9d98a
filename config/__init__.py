"""Configurations to start from, and the pages that are made from what they say."""
