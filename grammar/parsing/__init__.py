"""Parsers of streamed output text: content and tool calls."""
