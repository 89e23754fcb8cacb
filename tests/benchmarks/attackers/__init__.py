"""Clients that try to take the service from other tenants, one attack per module."""
