"""JSON Schema analysis and validation, independent of any backend."""
