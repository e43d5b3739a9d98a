"""The reference pages: every setting, every metric. `python -m config.reference` writes them."""
