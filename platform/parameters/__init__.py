"""Request parameters, checked."""
