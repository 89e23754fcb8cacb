"""Limits of tenants, keys and adapters, and what a request reserves of them."""
