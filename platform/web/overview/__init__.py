"""The first page of a tenant: routes, pages and queries."""
