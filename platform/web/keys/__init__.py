"""API keys: routes, pages and queries."""
