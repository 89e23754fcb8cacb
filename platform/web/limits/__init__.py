"""Limits: what they are, what was used, and why a request was refused: routes, pages and queries."""
