"""Adapters, versions, aliases and uploads: routes, pages and queries."""
