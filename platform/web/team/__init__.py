"""The people of a tenant: routes, pages and queries."""
