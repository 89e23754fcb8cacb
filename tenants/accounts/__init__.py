"""Tenants, and their deletion."""
