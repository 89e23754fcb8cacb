"""Structured output: from `response_format` and tools to a grammar, and from the text back to content and calls."""
