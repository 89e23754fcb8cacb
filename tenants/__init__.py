"""Tenants, keys, adapters' catalogue rows and usage: PostgreSQL and Valkey behind repositories."""
