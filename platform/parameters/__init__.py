"""Request parameters: their types, bounds and checks."""
