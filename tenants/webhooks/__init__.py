"""The outbox: events of tenants, written with what they report, and how they reach webhooks."""
