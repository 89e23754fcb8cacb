"""The audit log: routes, pages and queries."""
