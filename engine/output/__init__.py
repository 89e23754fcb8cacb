"""Tokens to text and events, on a side thread."""
