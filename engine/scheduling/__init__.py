"""Continuous batching: which sequences and adapters run in the next step."""
