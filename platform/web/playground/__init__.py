"""The playground, and the tokens it sends with: routes, pages and queries."""
