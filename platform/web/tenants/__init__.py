"""Tenants, their tier and billing, and sign-up: routes, pages and queries."""
