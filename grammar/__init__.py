"""Structured output: output constraints of a request to grammars, and grammars to next-token masks."""
