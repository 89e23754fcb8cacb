"""Engines, counters and health, for operators: routes, pages and queries."""
