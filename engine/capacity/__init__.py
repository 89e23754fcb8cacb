"""Memory planning: what fits on a device."""
