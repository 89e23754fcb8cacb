"""Which keywords of a schema a backend enforces, and the relaxed schema that it compiles."""
