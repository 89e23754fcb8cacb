"""Webhooks: routes of the tenant plane and pages of the console."""
