"""Which keywords of a schema a backend enforces, and what is left of the schema for it."""
