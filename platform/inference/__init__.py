"""One inference request, framework-free."""
