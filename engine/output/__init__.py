"""Tokens to text and events, on the output thread."""
