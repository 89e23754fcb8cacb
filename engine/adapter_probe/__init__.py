"""Checks a new adapter on a running engine before it serves."""
