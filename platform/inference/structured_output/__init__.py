"""`response_format` and tools to a grammar, and back."""
