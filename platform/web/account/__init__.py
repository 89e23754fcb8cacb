"""One's own account, and signing in: routes, pages and queries."""
