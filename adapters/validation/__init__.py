"""Checks of two untrusted files: an adapter's configuration and weights."""
