"""Metrics, health and request statistics."""
