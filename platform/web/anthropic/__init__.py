"""The Messages API (Anthropic): one module for each endpoint."""
