"""Background jobs of a gateway."""
