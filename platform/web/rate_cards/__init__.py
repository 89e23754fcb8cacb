"""Rate cards: routes, pages and queries."""
