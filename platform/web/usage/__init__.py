"""Usage, requests and corrections: routes, pages and queries."""
