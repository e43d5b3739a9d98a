"""The same policy on virtual time."""
